"""Models that anyone can make offline: a real chat model as a mixture of experts, and tiny random checkpoints."""

from moe_runtime.models.demo.build import build_demo_model, build_dense_model, default_demo_dir, default_dense_dir
from moe_runtime.models.demo.random_models import RANDOM_FAMILIES, write_random_model
from moe_runtime.models.demo.wheel import WheelError

__all__ = [
    "RANDOM_FAMILIES",
    "WheelError",
    "build_demo_model",
    "build_dense_model",
    "default_demo_dir",
    "default_dense_dir",
    "write_random_model",
]
