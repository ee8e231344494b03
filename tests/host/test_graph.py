"""HostGraph: replay gives what eager gives, on the same addresses, and memory behaves as it does around CUDA graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vmm_kv._native import DeviceModel, Lease
from vmm_kv.errors import StateError
from vmm_kv.host import GraphPool, HostGraph, HostMemory, capture

MIB = 1 << 20
GRAD_MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture
def model() -> DeviceModel:
    return DeviceModel([64 * MIB])


@pytest.fixture
def memory(model: DeviceModel) -> HostMemory:
    return HostMemory(model, 0)


@pytest.fixture
def pool(memory: HostMemory) -> GraphPool:
    return GraphPool(memory)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape).to(dtype)


def ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def bools(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) > 0.5


def distinct(high: int, count: int) -> Callable[[], Tensor]:
    return lambda: torch.randperm(high)[:count]


def store(k: Tensor, i: Tensor, value: Tensor) -> Tensor:
    k[i] = value
    return k * 2


def store_row(k: Tensor, value: Tensor) -> Tensor:
    k[1, 2:4] = value
    return k.sum(0)


def fresh_then_written(i: Tensor, value: Tensor) -> Tensor:
    k = torch.zeros(8, 4)
    k.index_copy_(0, i, value)
    k += 1
    return k


def scratch_by_empty(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    return torch.mul(x, 3, out=y) + 1


def rope(x: Tensor, position: Tensor) -> Tensor:
    angle = position[:, None] * torch.arange(4)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def rope_complex(x: Tensor, angle: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.reshape(4, 4, 2)) * torch.polar(torch.ones_like(angle), angle).conj()
    return torch.view_as_real(turned).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


HEADS, GROUPED = floats(1, 4, 6, 8), floats(1, 2, 6, 8)
HALF = floats(1, 4, 6, 8, dtype=torch.bfloat16)
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...]]] = {
    "matmul": (torch.matmul, (floats(4, 8), floats(8, 5))),
    "matmul_broadcast": (torch.matmul, (floats(2, 3, 4, 8), floats(8, 5))),
    "bmm": (torch.bmm, (floats(3, 4, 8), floats(3, 8, 5))),
    "baddbmm": (torch.baddbmm, (floats(3, 4, 5), floats(3, 4, 8), floats(3, 8, 5))),
    "linear": (F.linear, (floats(4, 8), floats(5, 8), floats(5))),
    "linear_3d_bf16": (F.linear, (floats(2, 4, 8, dtype=torch.bfloat16), floats(5, 8, dtype=torch.bfloat16))),
    "softmax": (lambda x: x.softmax(-1), (floats(4, 8),)),
    "log_softmax": (lambda x: x.log_softmax(0), (floats(4, 8),)),
    "softmax_to_float": (lambda x: x.softmax(-1, dtype=torch.float32), (floats(4, 8, dtype=torch.bfloat16),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (floats(4, 8), floats(8), floats(8))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (floats(4, 8), floats(8))),
    "rms_norm_by_hand": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), (floats(4, 8),)),
    "index_select": (lambda x, i: x.index_select(0, i), (floats(6, 4), ints(6, 5))),
    "index": (lambda x, i: x[i], (floats(6, 4), ints(6, 2, 3))),
    "index_second": (lambda x, i: x[:, i], (floats(6, 4), ints(4, 3))),
    "embedding": (F.embedding, (ints(6, 5), floats(6, 4))),
    "gather": (lambda x, i: x.gather(1, i), (floats(3, 6), ints(6, 3, 2))),
    "index_put_": (lambda k, i, v: k.index_put_((i,), v), (floats(6, 4), distinct(6, 3), floats(3, 4))),
    "setitem": (store, (floats(6, 4), distinct(6, 3), floats(3, 4))),
    "setitem_slice": (store_row, (floats(3, 6, 4), floats(2, 4))),
    "index_copy_": (lambda k, i, v: k.index_copy_(0, i, v), (floats(6, 4), distinct(6, 3), floats(3, 4))),
    "index_add": (lambda k, i, v: k.index_add(0, i, v), (floats(6, 4), ints(6, 3), floats(3, 4))),
    "scatter_": (
        lambda k, i, v: k.scatter_(0, i, v),
        (floats(6, 3), lambda: torch.randperm(6)[:3][None], floats(1, 3)),
    ),
    "sdpa": (attend, (HEADS, HEADS, HEADS)),
    "sdpa_causal": (lambda *x: attend(*x, is_causal=True), (HEADS, HEADS, HEADS)),
    "sdpa_mask": (attend, (HEADS, HEADS, HEADS, floats(6, 6))),
    "sdpa_bool_mask": (lambda q, k, v, m: attend(q, k, v, m | torch.eye(6).bool()), (HEADS, HEADS, HEADS, bools(6, 6))),
    "sdpa_grouped": (lambda *x: attend(*x, enable_gqa=True), (HEADS, GROUPED, GROUPED)),
    "sdpa_bf16": (attend, (HALF, HALF, HALF)),
    "silu": (F.silu, (floats(4, 8),)),
    "gelu": (F.gelu, (floats(4, 8),)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (floats(4, 8),)),
    "cat": (lambda x, y: torch.cat((x, y), 1), (floats(2, 3), floats(2, 4))),
    "stack": (lambda x, y: torch.stack([x, y]), (floats(2, 3), floats(2, 3))),
    "split": (lambda x: [part + 1 for part in x.split((2, 4), -1)], (floats(3, 6),)),
    "unbind": (lambda x: sum(x.unbind(1)), (floats(3, 6),)),
    "rope": (rope, (floats(5, 8), ints(9, 5))),
    "rope_complex": (rope_complex, (floats(4, 8), floats(4, 4))),
    "argmax": (lambda x: x.argmax(-1), (floats(4, 8),)),
    "max_dim": (lambda x: x.max(-1), (floats(4, 8),)),
    "topk": (lambda x: x.topk(3), (floats(4, 8),)),
    "sort": (lambda x: x.sort(-1, descending=True), (floats(4, 8),)),
    "cumsum": (lambda x: x.cumsum(0), (floats(4, 8),)),
    "where": (torch.where, (bools(4, 8), floats(4, 8), floats(8))),
    "where_scalar": (lambda c, x: torch.where(c, x, 0.0), (bools(4, 8), floats(4, 8))),
    "masked_fill": (lambda x, m: x.masked_fill(m, -1.0), (floats(4, 8), bools(4, 8))),
    "fp8": (lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), (floats(4, 8),)),
    "fp8_result": (lambda x: (x / 2).to(torch.float8_e4m3fn), (floats(4, 8),)),
    "to_bf16_transposed": (lambda x: x.t().to(torch.bfloat16), (floats(4, 8),)),
    "reshape_copies": (lambda x: x.transpose(0, 1).reshape(-1), (floats(3, 4, 5),)),
    "reshape_views": (lambda x: x.reshape(-1).relu_(), (floats(3, 4),)),
    "contiguous": (lambda x: x.t().contiguous(), (floats(3, 4),)),
    "expand": (lambda x: x[:, None].expand(3, 2, 4) * 2, (floats(3, 4),)),
    "einsum": (lambda x, y: torch.einsum("bhd,bd->hb", x, y), (floats(3, 2, 4), floats(3, 4))),
    "var_mean": (lambda x: torch.var_mean(x, -1), (floats(4, 8),)),
    "compare": (lambda x, y: (x < y) & (x > 0), (floats(4, 8), floats(4, 8))),
    "integers": (lambda i: (i // 2) * 3 + i % 5, (ints(100, 7),)),
    "scalar": (lambda x: x.sum() / 3, (floats(4),)),
    "nothing": (lambda x: x[:0] + 1, (floats(4),)),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n % 1 + 2, output_size=8), (floats(4), ints(3, 4))),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (floats(1, 2, 3, 3),)),
    "conv": (F.conv1d, (floats(1, 3, 9), floats(4, 3, 3))),
    "loss": (F.binary_cross_entropy_with_logits, (floats(4), lambda: torch.rand(4))),
    "huber": (F.huber_loss, (floats(4, 5), floats(4, 5))),
    "factories": (fresh_then_written, (distinct(8, 3), floats(3, 4))),
    "empty": (scratch_by_empty, (floats(4, 8),)),
    "tensor_constant": (lambda x: x * torch.tensor([1.0, 2.0]), (floats(3, 2),)),
}


def made(makers: tuple[Callable[[], Tensor], ...], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [make() for make in makers]


def bits(tree: Any) -> list[list[int]]:
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in tree_leaves(tree)]


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_replay_is_eager_bit_for_bit_at_the_same_addresses(
    name: str, mode: type[torch.no_grad], pool: GraphPool, memory: HostMemory
) -> None:
    operation, makers = OPERATIONS[name]
    with mode():
        inputs = made(makers, 0)
        graph = HostGraph()
        with capture(graph, pool, memory):
            result = operation(*inputs)
        assert bits(result) == bits(operation(*made(makers, 0)))
        addresses = [t.data_ptr() for t in tree_leaves(result)]
        for seed in (1, 2):
            others = made(makers, seed)
            for mine, other in zip(inputs, others, strict=True):
                mine.copy_(other)
            graph.replay()
            assert bits(result) == bits(operation(*others))
            assert bits(inputs) == bits(others)  # what the operation wrote to its inputs
            assert [t.data_ptr() for t in tree_leaves(result)] == addresses


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x[0] > 0), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.unique_consecutive(), "unique_consecutive"),
        (lambda x: x[x > 0], "mask"),
        (lambda x: x[torch.tensor([1, 0, 1, 0], dtype=torch.uint8)], "mask"),
        (lambda x: x.index_put((x > 0,), torch.tensor(1.0)), "mask"),
        (lambda x: x.index_put_((x > 0,), torch.tensor(1.0)), "mask"),
        (lambda x: torch.equal(x, x + 1), "equal"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1])), "repeat_interleave"),
    ],
)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_a_gpu_cannot_capture_is_refused_by_name(
    operation: Callable[[Tensor], object], named: str, mode: type[torch.no_grad], pool: GraphPool, memory: HostMemory
) -> None:
    graph = HostGraph()
    with mode(), pytest.raises(StateError, match=named), capture(graph, pool, memory):
        operation(torch.ones(4) + 1)
    assert not graph.captured
    with mode(), capture(graph, pool, memory):  # the thread and the graph are fit for another go
        y = torch.ones(4) + 1
    graph.replay()
    assert y.tolist() == [2, 2, 2, 2]


def test_sparse_results_are_refused(pool: GraphPool, memory: HostMemory) -> None:
    x = torch.eye(3)
    with pytest.raises(NotImplementedError, match="storage"), capture(HostGraph(), pool, memory):
        x.to_sparse()


def test_states(model: DeviceModel, pool: GraphPool, memory: HostMemory) -> None:
    graph, other = HostGraph(), HostGraph()
    graph.reset()
    with pytest.raises(StateError, match="no capture"):
        graph.replay()
    with pytest.raises(ValueError, match="another memory"), capture(graph, pool, HostMemory(model, 0)):
        pass
    with capture(graph, pool, memory), pytest.raises(StateError, match="in progress"), capture(other, pool, memory):
        pass
    with capture(other, pool, memory), pytest.raises(StateError, match="inside a capture"):
        graph.replay()
    with pytest.raises(StateError, match="already"), capture(graph, pool, memory):
        pass
    graph.reset()
    with capture(graph, pool, memory):
        pass


def test_a_body_that_raises_frees_everything(model: DeviceModel, pool: GraphPool, memory: HostMemory) -> None:
    graph = HostGraph()
    with pytest.raises(KeyError, match="mine"), capture(graph, pool, memory):
        x = torch.ones(MIB) + 1
        raise KeyError("mine")
    assert not graph.captured and pool.used == 4 * MIB  # x
    del x
    gc.collect()
    memory.empty_cache()
    assert pool.used == pool.bytes == model.used(0) == 0


def test_a_chain_needs_two_buffers(pool: GraphPool, memory: HostMemory) -> None:
    x = torch.randn(MIB // 2)  # 2 MiB
    graph = HostGraph()
    with torch.no_grad(), capture(graph, pool, memory):
        y = x
        for _ in range(10):
            y = y.neg()
    assert (pool.bytes, pool.used) == (4 * MIB, 2 * MIB)
    x.copy_(torch.randn(MIB // 2))
    graph.replay()
    assert torch.equal(x, y)


def test_a_value_that_is_needed_later_keeps_its_place(pool: GraphPool, memory: HostMemory) -> None:
    x = torch.randn(1000)
    graph = HostGraph()
    with torch.no_grad(), capture(graph, pool, memory):
        early = x + 1
        view = early[10:]
        late = early * 2
        for _ in range(4):
            late = late + 1
        total = late[10:] + view
        del early
    x.zero_()
    graph.replay()
    assert torch.equal(view, torch.ones(990)) and torch.equal(total, torch.full((990,), 7.0))


@pytest.mark.parametrize(("sizes", "segments"), [((1, 2, 4, 8), 15 * 2), ((8, 4, 2, 1), 8 * 2)])
def test_graphs_share_a_pool(sizes: tuple[int, ...], segments: int, pool: GraphPool, memory: HostMemory) -> None:
    """Case C27 with real captures: smallest first costs the sum, largest first the largest (here 2 MiB each)."""
    graphs = []
    for size in sizes:
        x = torch.ones(size * MIB // 2)
        graphs.append((graph := HostGraph(), x))
        with torch.no_grad(), capture(graph, pool, memory):
            x + 1
    assert pool.bytes == memory.pooled() == segments * MIB and pool.used == 0


def test_a_graph_takes_the_result_of_another_as_input(pool: GraphPool, memory: HostMemory) -> None:
    x = torch.ones(100)
    first, second = HostGraph(), HostGraph()
    with torch.no_grad():
        with capture(first, pool, memory):
            y = x + 1
        with capture(second, pool, memory):
            z = y * 10
    x.fill_(4.0)
    first.replay()
    second.replay()
    assert z[0] == 50


def test_a_dead_graph_returns_its_segments(model: DeviceModel, pool: GraphPool, memory: HostMemory) -> None:
    first, second = HostGraph(), HostGraph()
    for graph in (first, second):
        with torch.no_grad(), capture(graph, pool, memory):
            y = torch.ones(MIB) + 1
    del y, graph
    first.reset()
    memory.empty_cache()
    assert model.used(0) == pool.bytes == 12 * MIB  # two results at once and a temporary
    del second
    memory.empty_cache()
    assert model.used(0) == pool.bytes == 0


def test_a_result_outlives_its_graph_and_keeps_the_segment(model: DeviceModel, memory: HostMemory) -> None:
    graph = HostGraph()
    with torch.no_grad(), capture(graph, GraphPool(memory), memory):
        y = torch.ones(MIB) + 1
    del graph
    gc.collect()
    memory.empty_cache()
    assert torch.equal(y, torch.full((MIB,), 2.0)) and model.used(0) >= 4 * MIB
    del y
    memory.empty_cache()
    assert model.used(0) == 0


def test_free_memory_sample_around_the_first_capture_is_negative_when_the_cache_was_full(
    model: DeviceModel, pool: GraphPool, memory: HostMemory
) -> None:
    """Capture empties the cache, so the graph seems to have given memory, and hides what it took."""
    with memory.charging(), torch.no_grad():
        x = torch.ones(1024)
        torch.ones(6 * MIB)  # 24 MiB of warm-up, cached
        samples = []
        for _ in range(2):
            before = model.used(0)
            with capture(graph := HostGraph(), pool, memory):
                y = x + 1
            samples.append(model.used(0) - before)
    assert graph.captured and y[0] == 2
    assert samples == [2 * MIB - 24 * MIB, 0]


def test_only_segments_are_charged_while_capturing(model: DeviceModel, pool: GraphPool, memory: HostMemory) -> None:
    with memory.charging(), torch.no_grad():
        weight = torch.ones(64, 64)
        allocated = memory.allocated()
        with capture(graph := HostGraph(), pool, memory), memory.charging():
            y = (weight @ weight).to(torch.bfloat16).to(torch.float32) + torch.arange(64)
        graph.replay()
        z = y + 1
        assert memory.allocated() == allocated + z.nbytes
    assert memory.reserved() == model.used(0) == allocated + z.nbytes + 2 * MIB


def test_out_of_memory_in_a_capture_leaks_nothing(model: DeviceModel, pool: GraphPool, memory: HostMemory) -> None:
    with memory.charging():
        weight = torch.ones(MIB)
    graph = HostGraph()
    used = model.used(0)
    with pytest.raises(torch.OutOfMemoryError, match="graph pools"), torch.no_grad(), capture(graph, pool, memory):
        parts = [weight + step for step in range(100)]
        assert not parts
    gc.collect()
    memory.empty_cache()
    assert (model.used(0), pool.bytes, memory.reserved()) == (used, 0, used)
    with torch.no_grad(), capture(graph, pool, memory):
        y = weight + 1
    graph.replay()
    assert y[0] == 2


def test_replay_writes_to_tensors_made_in_inference_mode(pool: GraphPool, memory: HostMemory) -> None:
    with torch.inference_mode():
        k, x = torch.zeros(4), torch.ones(4)
        with capture(graph := HostGraph(), pool, memory):
            k.add_(x)
            y = k * 2
    graph.replay()
    assert k.tolist() == [2, 2, 2, 2] and y.tolist() == [4, 4, 4, 4]
    y.zero_()  # a result is no inference tensor


def test_training_records_the_forward_pass(pool: GraphPool, memory: HostMemory) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with capture(graph := HostGraph(), pool, memory):
        y = layer(x).relu()
    assert y.requires_grad
    x.normal_()
    graph.replay()
    assert torch.equal(y, layer(x).relu())


def test_random_numbers_are_fresh_at_each_replay(pool: GraphPool, memory: HostMemory) -> None:
    with torch.no_grad(), capture(graph := HostGraph(), pool, memory):
        y = torch.rand(8) * 2
    first = y.clone()
    graph.replay()
    assert not torch.equal(y, first)
    torch.manual_seed(7)
    graph.replay()
    torch.manual_seed(7)
    assert torch.equal(y, torch.rand(8) * 2)


def test_threads_capture_into_one_pool(pool: GraphPool, memory: HostMemory) -> None:
    results: dict[int, tuple[HostGraph, Tensor, Tensor]] = {}

    def work(seed: int) -> None:
        x = torch.full((512,), float(seed))
        with torch.no_grad(), capture(graph := HostGraph(), pool, memory):
            y = x
            for _ in range(50):
                y = y + 1
        results[seed] = (graph, x, y)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.used == 4 * 2048
    for seed, (graph, x, y) in results.items():
        x.zero_()
        graph.replay()
        assert torch.equal(y, torch.full((512,), 50.0)) and seed < 4


class Layer(nn.Module):
    """One decoder layer, with keys and values in blocks of 4 slots."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, kv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, self.heads, -1).unbind(1)
        keys, values = kv.flatten(1, 2).unbind(0)  # views of (2, blocks, 4, heads, width)
        keys.index_put_((slots,), k)
        values.index_put_((slots,), v)
        past = kv[:, table].flatten(1, 2).transpose(1, 2)  # a row of blocks for the whole batch
        x = x + self.out(F.scaled_dot_product_attention(q.transpose(0, 1), past[0], past[1]).transpose(0, 1).flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_writes_its_cache_and_replays_with_other_slots(
    mode: type[torch.no_grad], pool: GraphPool, memory: HostMemory
) -> None:
    torch.manual_seed(0)
    backing = torch.zeros(2 * 8 * 4 * 32)  # stands for mapped memory: a tensor over a raw address
    lease = Lease()
    raw = torch.utils.dlpack.from_dlpack(lease.capsule(backing.data_ptr(), backing.nbytes, 1, 0))
    kv = raw.view(torch.float32).view(2, 8, 4, 2, 16)
    with mode(), memory.charging():
        layers = [Layer(32, 2) for _ in range(2)]
        x, slots, table = torch.randn(3, 32), torch.tensor([4, 5, 6]), torch.tensor([1, 3])
        with capture(graph := HostGraph(), pool, memory):
            y = x
            for layer in layers:
                y = layer(y, kv, slots, table)
        for first, blocks in ((9, [2, 3]), (28, [7, 0])):
            backing.zero_()
            x.normal_()
            slots.copy_(torch.arange(first, first + 3))
            table.copy_(torch.tensor(blocks))
            graph.replay()
            wanted_kv, wanted = torch.zeros_like(kv), x
            for layer in layers:
                wanted = layer(wanted, wanted_kv, slots, table)
            assert torch.equal(y, wanted) and torch.equal(kv, wanted_kv)
            assert int(wanted_kv[0].flatten(0, 1).abs().sum((1, 2)).count_nonzero()) == 3
    assert pool.used == 512  # y is all that is left of the capture


def test_a_graph_keeps_its_pool_when_all_else_is_gone() -> None:
    """As `torch.cuda.CUDAGraph` does: the recorded addresses lie in the pool, whoever lets go of pool and device."""

    def build() -> tuple[HostGraph, Tensor, Tensor, list[weakref.ref[Any]]]:
        memory = HostMemory(DeviceModel([64 * MIB]), 0)
        pool, graph, x, out = GraphPool(memory), HostGraph(), torch.ones(MIB), torch.zeros(MIB)
        with torch.no_grad(), capture(graph, pool, memory):
            out.copy_((x + 1) * 2 + 3)
        return graph, x, out, [weakref.ref(segment) for segment in pool.segments]

    graph, x, out, segments = build()
    gc.collect()
    assert segments and all(segment() is not None for segment in segments)  # a replay would be a segmentation fault
    x.fill_(4)
    graph.replay()
    assert out.eq(13).all()
    graph.reset()
    gc.collect()
    assert all(segment() is None for segment in segments)


def test_a_capture_that_raised_keeps_no_pool(memory: HostMemory) -> None:
    pool, graph = GraphPool(memory), HostGraph()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), capture(graph, pool, memory):
        raise ZeroDivisionError
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and not graph.captured
