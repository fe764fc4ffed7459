"""Attention over gathered keys on real gloo ranks equals attention over each document alone."""

from pathlib import Path

import pytest
import torch

from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
LENGTHS = [37, 1, 260, 5, 64, 0, 13, 1, 90]
CAUSAL = (-1, 0)
CASES = {
    "te": ({}, CAUSAL),
    "head_tail": ({}, CAUSAL),
    "contiguous": ({}, CAUSAL),
    "whole_document": ({}, CAUSAL),
    "whole_document-all-cut": ({"threshold": 4}, CAUSAL),
    "identity": ({}, CAUSAL),
    "te-window": ({}, (20, 0)),
    "whole_document-window": ({"threshold": 4}, (50, 0)),
    "contiguous-both-sides": ({}, (30, 7)),
    "head_tail-whole": ({}, (-1, -1)),
}
"""Layout -> its options and the window."""
CHANGED = 2
CHANGED_TOKEN = 100
"""The document of which one token changes in the leak test, and which of it."""
TENSORS = ("out", "grad_q", "grad_k", "grad_v")


def make_case(name, *, cp_size):
    options, window = CASES[name]
    layout = make_layout(name.split("-")[0], **options)
    offsets = slot_offsets(LENGTHS, multiple=layout.length_multiple(cp_size), total=512)
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (512, 4, 16), "k": (512, 2, 16), "v": (512, 2, 16), "weight": (512, 4, 16)}
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return {
        "layout": layout.name,
        "options": options,
        "window": window,
        "cu_seqlens": torch.from_numpy(offsets.cu_seqlens),
        "cu_seqlens_padded": torch.from_numpy(offsets.cu_seqlens_padded),
        **tensors,
    }


def with_one_token_changed(case):
    token = int(case["cu_seqlens_padded"][CHANGED]) + CHANGED_TOKEN
    changed = dict(case)
    for name in ("q", "k", "v"):
        changed[name] = case[name].clone()
        changed[name][token] += 1.0
    return changed


def whole_chunk(results, name, case, *, cp_size):
    """Put the ranks' parts of one case back into chunk order."""
    layout = make_layout(case["layout"], **case["options"])
    offsets = {"cu_seqlens": case["cu_seqlens"], "cp_size": cp_size}
    maps = [layout.index_map(case["cu_seqlens_padded"], cp_rank=r, **offsets) for r in range(cp_size)]
    return {t: merge(maps, [result[name][t] for result in results]) for t in TENSORS}


@pytest.fixture(scope="module", params=[2, 4], ids=["cp2", "cp4"])
def runs(request, tmp_path_factory, run_ranks):
    """Case name -> (the case, its results in chunk order), from one start of the ranks."""
    cp_size = request.param
    folder = tmp_path_factory.mktemp("ranks")
    cases = {}
    for name in CASES:
        cases[name] = make_case(name, cp_size=cp_size)
        cases[f"{name}/changed"] = with_one_token_changed(cases[name])
    torch.save(cases, folder / f"cases-{cp_size}.pt")
    run_ranks(HERE / "allgather_rank.py", num_ranks=cp_size, folder=folder)
    results = [torch.load(folder / f"results-{cp_size}-{rank}.pt") for rank in range(cp_size)]
    return {name: (case, whole_chunk(results, name, case, cp_size=cp_size)) for name, case in cases.items()}


def documents(case):
    """Chunk positions of each document's real tokens."""
    real, slots = case["cu_seqlens"].tolist(), case["cu_seqlens_padded"].tolist()
    return [range(slots[i], slots[i] + real[i + 1] - real[i]) for i in range(len(real) - 1)]


def unsharded(case):
    """Each document alone on one process, softmax written out; real rows only."""
    q, k, v = (case[name].clone().requires_grad_() for name in ("q", "k", "v"))
    left, right = (side if side >= 0 else 512 for side in case["window"])
    out = torch.zeros_like(q)
    for document in documents(case):
        rows = slice(document.start, document.stop)
        keys, values = (x[rows].repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / 4.0
        pairs = torch.ones(len(document), len(document), dtype=torch.bool)
        weights = scores.masked_fill(pairs.triu(right + 1) | pairs.tril(-left - 1), float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    grads = torch.autograd.grad((out * case["weight"]).sum(), (q, k, v))
    return dict(zip(TENSORS, (out.detach(), *grads), strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_equals_attention_over_each_document_alone(runs, name, tensor):
    case, found = runs[name]
    real = [token for document in documents(case) for token in document]

    torch.testing.assert_close(found[tensor][real], unsharded(case)[tensor][real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_padding_rows_are_zero(runs, name, tensor):
    case, found = runs[name]
    is_padding = torch.ones(512, dtype=torch.bool)
    is_padding[[token for document in documents(case) for token in document]] = False

    assert is_padding.any()
    assert not found[tensor][is_padding].any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_changed_token_changes_nothing_outside_its_document(runs, name, tensor):
    (case, before), (_, after) = runs[name], runs[f"{name}/changed"]
    inside = torch.zeros(512, dtype=torch.bool)
    inside[list(documents(case)[CHANGED])] = True

    assert not torch.equal(before[tensor][inside], after[tensor][inside])
    assert torch.equal(before[tensor][~inside], after[tensor][~inside])


@pytest.mark.parametrize("name", CASES)
def test_a_changed_token_changes_only_the_rows_whose_window_has_it(runs, name):
    (case, before), (_, after) = runs[name], runs[f"{name}/changed"]
    left, right = case["window"]
    document = documents(case)[CHANGED]
    token = document.start + CHANGED_TOKEN
    first = document.start if right < 0 else max(document.start, token - right)
    last = document.stop - 1 if left < 0 else min(document.stop - 1, token + left)

    changed = (before["out"] != after["out"]).flatten(1).any(1).nonzero().flatten().tolist()

    assert changed == list(range(first, last + 1))
