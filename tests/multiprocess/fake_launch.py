"""`moe-runtime launch` with fake nodes and a model that exists on paper: fake_launch.py OPTIONS_JSON OVERRIDE..."""

import json
import sys
from pathlib import Path

from moe_runtime.cluster.launcher import LaunchOptions, check_address_free, run_cluster
from moe_runtime.cluster.model import ResolvedModel
from moe_runtime.config import load_config
from moe_runtime.models.spec import FfnSpec, LayerSpec, ModelSpec, RopeSpec

FAKE_NODE = (sys.executable, str(Path(__file__).with_name("fake_node.py")))
SPEC = ModelSpec(
    family="mixtral",
    vocab=8,
    hidden=8,
    heads=1,
    kv_heads=1,
    head_dim=8,
    max_context=64,
    layers=(LayerSpec(FfnSpec(routed=4, top_k=2, intermediate=8)),),
    rope=RopeSpec((1.0,)),
    norm_eps=1e-5,
    attention_scale=1.0,
)

if __name__ == "__main__":
    config = load_config(Path(__file__).parents[2] / "configs" / "demo.yaml", sys.argv[2:])
    check_address_free(config.gateway)
    texts = json.loads(sys.argv[1])
    options = LaunchOptions(
        ask=texts.get("ask"),
        greet=texts.get("greet"),
        log_dir=Path(texts["log_dir"]) if "log_dir" in texts else None,
        commands={
            "attention": (*FAKE_NODE, "attention"),
            "ffn": (*FAKE_NODE, "ffn"),
            "gateway": (*FAKE_NODE, "gateway"),
        },
    )
    sys.exit(run_cluster(config, ResolvedModel(Path("paper"), SPEC, 1), options))
