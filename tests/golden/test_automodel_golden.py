"""Every vector of nemo-automodel 0.7.0: the same values, dtypes and keys, or the defect that is mended.

Origin: ``data/thd_dev.json``, outputs of the original functions (see that folder's README of the
vectors). Never regenerate from ringfeed. ``INSTEAD`` says, case by case, what ringfeed does where the
original loses or corrupts data.
"""

import contextlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.experimental._attention

from ringfeed.sharding import automodel

GOLDEN_FILE = "thd_dev.json"
GOLDEN_OPS = [
    "make_cp_batch_for_te",
    "process_input_for_thd",
    "split_batch_into_thd_chunks",
    "thd_padding_mask_from_token_ids",
    "thd_get_partitioned_indices",
    "round_robin_local_indices",
    "contiguous_local_indices",
    "shard_batch_contiguous",
    "shard_batch_load_balanced",
    "shard_grad_buffer_for_cp",
    "token_verbs",
]
NUM_CASES = 85


def vec(*values, dtype="int64"):
    return torch.tensor(values, dtype=getattr(torch, dtype))


def mask(marks):
    return torch.tensor([mark == "x" for mark in marks])


ANY_LOSS_MASK = vec(*[1] * 8, *[0] * 8)
PIXELS = torch.tensor([[1.5, 2.5]])
# What differs from the recorded result, or the words of the ValueError that refuses the input.
INSTEAD: dict = {
    # The tail of row 0 belongs to its last slot; the original moves row 1 up by one token.
    "dev-005": {
        "cu_seqlens": vec(0, 2, 4, 7, 14, dtype="int32"),
        "cu_seqlens_padded": vec(0, 2, 4, 8, 15, dtype="int32"),
        "max_seqlen": torch.tensor(7, dtype=torch.int32),
        "padding_mask": mask("-------x-------x"),
    },
    "dev-010": "num_chunks=2 does not divide the 3 rows",
    "dev-014": {"loss_mask": ANY_LOSS_MASK},
    "dev-015": {"pixel_values": PIXELS},
    "dev-028": {"loss_mask": vec(*[1] * 4, *[0] * 4)},
    "dev-030": {"input_ids": torch.tensor([[10.25, 10.5], [13.25, 13.5]])},
    "dev-035": {"pixel_values": torch.tensor([[1.5]]), "tag": "x"},
    # Slots cover 8 of 12: the last one takes the rest, and the ranks tile the stream.
    "dev-036": {
        "cu_seqlens": vec(0, 4, 12, dtype="int32"),
        "max_seqlen": torch.tensor(8, dtype=torch.int32),
        "local_indices": vec(0, 3, 4, 5, 10, 11, dtype="int32"),
        "input_ids": vec(10, 0, 13, 14, 0, 0),
        "labels": vec(11, -100, 14, 15, -100, -100),
        "position_ids": vec(0, 3, 0, 1, 2, 3),
    },
    "dev-037": {
        "cu_seqlens": vec(0, 4, 12, dtype="int32"),
        "max_seqlen": torch.tensor(8, dtype=torch.int32),
        "local_indices": vec(1, 2, 6, 7, 8, 9, dtype="int32"),
        "input_ids": vec(11, 12, 15, 16, 0, 0),
        "labels": vec(12, -100, 16, -100, -100, -100),
        "position_ids": vec(1, 2, 2, 3, 0, 1),
        "padding_mask": mask("----xx"),
    },
    "dev-038": "slot 0 has 6 tokens, not a multiple of 4",
    # 3-D positions are cut on their token axis; the original raises IndexError.
    "dev-047": {
        "batch": {
            "input_ids": vec(10, 11, 16, 17),
            "labels": vec(11, 12, 17, -100),
            "position_ids": torch.tensor([[[0, 1, 6, 7]], [[0, 2, 12, 14]], [[0, 3, 18, 21]]]),
            "padding_mask": mask("----"),
            "cu_seqlens": vec(0, 8, dtype="int32"),
            "max_seqlen": torch.tensor(8, dtype=torch.int32),
            "qkv_format": "thd",
            "cp_size": 2,
            "cp_rank": 0,
        },
        "local_indices": vec(0, 1, 6, 7, dtype="int32"),
        "input_unchanged": True,
    },
}
ERRORS = {
    error.__name__: error
    for error in (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
}


def decode(value):
    """Vectors as tensors, and everything in them."""
    if isinstance(value, dict) and set(value) == {"dtype", "shape", "data"}:
        return torch.tensor(value["data"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if isinstance(value, dict):
        return {key: decode(inner) for key, inner in value.items()}
    return [decode(inner) for inner in value] if isinstance(value, list) else value


def assert_same(actual, expected, where=""):
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(actual, expected), f"{where}: {actual} is not {expected}"
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(actual[i], value, f"{where}[{i}]")
    else:
        assert actual == expected, where


def expected_of(case):
    """What ringfeed should give: the recorded result, with the mended fields in place."""
    instead = INSTEAD.get(case["id"][:7], {})
    expected = decode(case["expect"].get("ok", {}))
    for name, value in instead.items():
        target = expected if name in ("batch", "local_indices", "input_unchanged") else expected["batch"]
        target[name] = value
    return expected


def mesh_of(args):
    size, rank = args.pop("cp_size", None), args.pop("cp_rank", 0)
    return None if size is None else stub_mesh(size, rank)


def stub_mesh(size, rank):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def fields_of(layout):
    names = (
        "local_token_global_indices",
        "original_seq_len",
        "padded_seq_len",
        "input_row_shape",
        "input_token_stream_positions",
    )
    found = {name: getattr(layout, name) for name in names}
    if found["input_row_shape"] is not None:
        found["input_row_shape"] = list(found["input_row_shape"])
    return found


def run_make_cp_batch_for_te(args, _):
    mesh, batch = mesh_of(args), args.pop("batch")
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    names = set(batch)
    made, indices = automodel.make_cp_batch_for_te(mesh, batch, return_local_indices=True, **args)
    unchanged = set(batch) == names and all(torch.equal(batch[name], before[name]) for name in before)
    return {"batch": made, "local_indices": indices, "input_unchanged": unchanged}


def run_process_input_for_thd(args, _):
    return {"batch": automodel.process_input_for_thd(**args)}


def run_split_batch_into_thd_chunks(args, _):
    return {"batch": automodel.split_batch_into_thd_chunks(**args)}


def run_thd_padding_mask_from_token_ids(args, _):
    return {"mask": automodel.thd_padding_mask_from_token_ids(**args)}


def run_thd_get_partitioned_indices(args, _):
    order = ("cu_seqlens", "total_tokens", "cp_size", "cp_rank")
    return {"indices": automodel.thd_get_partitioned_indices(*(args[name] for name in order))}


def run_round_robin_local_indices(args, _):
    return {"indices": automodel.round_robin_local_indices(mesh_of(args), **args)}


def run_contiguous_local_indices(args, _):
    return {"indices": automodel.contiguous_local_indices(mesh_of(args), **args)}


def run_shard_batch_contiguous(args, _):
    context, batch, layout = automodel.shard_batch_contiguous(mesh_of(args), None, args.pop("batch"), **args)
    assert context is contextlib.nullcontext
    return {"batch": batch, "layout": fields_of(layout), "context": "nullcontext"}


def run_shard_batch_load_balanced(args, monkeypatch):
    mesh, batch, ring = mesh_of(args), args.pop("batch"), FakeRing(monkeypatch)
    context, made, layout = automodel.shard_batch_load_balanced(mesh, None, batch, **args)
    assert not ring.buffers, "torch's context was touched before the factory's was entered"
    before = {name: value.clone() for name, value in made.items()}
    with context():
        given = ring.buffers
    local = [
        value.index_select(dim, automodel.round_robin_local_indices(mesh, value.shape[dim]))
        for value, dim in zip(given, ring.dims, strict=True)
    ]
    return {
        "batch_before_enter": before,
        "buffers_before_enter": given,
        "buffer_seq_dims": ring.dims,
        "buffer_no_restore": [any(value is kept for kept in ring.kept) for value in given],
        "local_buffers": local,
        "rotate_method": ring.rotate_method,
        "layout": fields_of(layout),
    }


class FakeRing:
    """Stands in for torch's context, which needs a process group, and records what it is given."""

    def __init__(self, monkeypatch):
        self.buffers: list = []
        self.dims: list = []
        self.kept: set = set()
        self.rotate_method = None
        experimental = torch.distributed.tensor.experimental
        self.options = experimental._attention._cp_options
        alltoall = experimental._attention._RotateMethod.ALL_TO_ALL
        monkeypatch.setattr(self.options, "rotate_method", alltoall)
        monkeypatch.setattr(experimental, "context_parallel", self.enter)

    @contextlib.contextmanager
    def enter(self, _mesh, *, buffers, buffer_seq_dims, no_restore_buffers):
        self.buffers, self.dims, self.kept = buffers, buffer_seq_dims, no_restore_buffers
        self.rotate_method = self.options.rotate_method.name.replace("_", "").lower()
        yield


def run_shard_grad_buffer_for_cp(args, _):
    mesh, buffer = mesh_of(args), args.pop("buffer")
    buffer.requires_grad_(buffer.is_floating_point())
    local = automodel._shard_grad_buffer_for_cp(buffer, args["seq_dim"], mesh)
    made = {"local": local.detach()}
    if buffer.requires_grad:
        local.sum().backward()
        made["grad_of_sum"] = buffer.grad
    return made


def run_token_verbs(args, monkeypatch):
    """Shard on every rank; gathering is putting the parts together, as it is between real ranks."""
    size, kind, tensor = args.pop("cp_size"), args.pop("layout"), args.pop("tensor")
    dims = {"seq_dim": args["seq_dim"]} if "seq_dim" in args else {}
    sharders = [sharder_of(kind, size, rank, decode_args(args), monkeypatch) for rank in range(size)]
    parts = [sharder.shard_token_tensor(tensor, fill=args.get("fill"), **dims) for sharder in sharders]
    dim = 0 if kind == "thd" else args.get("seq_dim", 1)
    indices = [sharder._indices(parts[0].shape[dim] * size, torch.device("cpu")) for sharder in sharders]
    whole = automodel._reorder_gathered_token_tensor(parts, indices, seq_dim=dim)
    monkeypatch.setattr(
        "ringfeed.sharding.automodel_sharder.gather_token_tensor_by_indices", lambda *_, **__: whole
    )
    return {
        "ranks": [
            {"rank": rank, "local": parts[rank], "layout": fields_of(sharder.shard_layout)}
            for rank, sharder in enumerate(sharders)
        ],
        "gathered": whole,
        "trimmed": sharders[0].gather_token_tensor(parts[0], seq_dim=dim, trim=True),
    }


def decode_args(args):
    return {name: value for name, value in args.items() if name not in ("seq_dim", "fill")}


def sharder_of(kind, size, rank, args, monkeypatch):
    device_mesh = {"cp": stub_mesh(size, rank)}
    mesh = type("Mesh", (dict,), {"mesh_dim_names": ("cp",)})(device_mesh)
    batch, chunks = args.pop("batch"), args.pop("num_chunks", 1)
    if kind == "contiguous":
        sharder = automodel.ContextParallelSharder(
            device_mesh=mesh,
            shard_batch=partial(automodel.shard_batch_contiguous, **args),
            local_token_global_indices=automodel.contiguous_local_indices,
        )
        sharder.shard(batch)
        return sharder
    return automodel._make_cp_batch_and_ctx(mesh, batch, use_te=kind == "thd", num_chunks=chunks)[2]


def test_vector(golden_case, monkeypatch):
    run = globals()[f"run_{golden_case['op']}"]
    args, expect = decode(golden_case["args"]), golden_case["expect"]
    instead = INSTEAD.get(golden_case["id"][:7])
    if isinstance(instead, str):
        with pytest.raises(ValueError, match=instead):
            run(args, monkeypatch)
    elif "error" in expect and instead is None:
        with pytest.raises(ERRORS[expect["error"]["type"]]):
            run(args, monkeypatch)
    else:
        assert_same(run(args, monkeypatch), expected_of(golden_case))


def test_every_case_of_the_file_is_run_and_every_mended_one_is_there():
    cases = json.loads((Path(__file__).parent / "data" / GOLDEN_FILE).read_text())["cases"]

    assert len(cases) == NUM_CASES == sum(case["op"] in GOLDEN_OPS for case in cases)
    assert set(INSTEAD) <= {case["id"][:7] for case in cases}


@pytest.mark.parametrize("name", ["thd_dev.json", "magi_dispatch_dev.json"])
def test_own_copy_of_the_vectors_equals_the_shared_one(name):
    own = Path(__file__).parent / "data" / name
    shared = Path(__file__).parents[3] / "shared" / "golden" / name
    if not shared.exists():
        pytest.skip("no shared vectors beside this checkout")

    assert json.loads(own.read_text()) == json.loads(shared.read_text())
