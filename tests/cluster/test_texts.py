"""Text is the same whatever the topology, lanes, chunks, pool and neighbours: greedy as transformers', sampled as
alone.

The full product of settings is `slow`; a cover of it runs with every test run.
"""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.cluster.client import complete_all, metric
from tests.cluster.reference import compare, greedy_references, prompts
from tests.cluster.seeded import SEEDED_TOKENS, is_near_boundary, sampling_options
from tests.cluster.settings import FULL, SHORT, Setting, cluster

GREEDY_TOKENS = 48
SETTINGS = [pytest.param(setting, id=str(setting)) for setting in SHORT] + [
    pytest.param(setting, id=str(setting), marks=pytest.mark.slow) for setting in FULL if setting not in SHORT
]


@pytest.fixture(scope="module")
def sampled_alone(demo_dir: Path) -> list[str]:
    """Each prompt's sampled text when nothing runs beside it, in one process without an exchange."""
    with cluster(Setting(1, 0)) as server:
        return [
            complete_all(server.url, [prompt], SEEDED_TOKENS, [options])[0]
            for prompt, options in zip(prompts(), sampling_options(), strict=True)
        ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts(setting: Setting, demo_dir: Path, sampled_alone: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    references = greedy_references(demo_dir, GREEDY_TOKENS)
    with cluster(setting) as server:
        texts = complete_all(server.url, prompts(), GREEDY_TOKENS, [{"temperature": 0}] * len(references))
        sampled = complete_all(server.url, prompts(), SEEDED_TOKENS, sampling_options())
        preemptions = sum(metric(server.url, "preemptions_total").values())
    verdicts = [compare(tokenizer, reference, text) for reference, text in zip(references, texts, strict=True)]
    ties = verdicts.count("tie")
    assert [verdict for verdict in verdicts if verdict not in ("equal", "tie")] == []
    assert ties <= 2
    different = [i for i, (text, alone) in enumerate(zip(sampled, sampled_alone, strict=True)) if text != alone]
    for i in different:
        assert is_near_boundary(demo_dir, prompts()[i], sampling_options()[i], sampled[i], sampled_alone[i])
    print(f"{setting}: {ties} greedy ties, {len(different)} draws at a boundary, {preemptions:.0f} preemptions")
    assert len(different) <= 2
    assert (preemptions > 0) == setting.small_pool
