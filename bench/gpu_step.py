"""Time of one decode step on a GPU, whole and by kernel, and prefill throughput: the steps alone, without an engine.

    python -m bench.gpu_step [--shape 0.5B] [--weights bf16 fp8 int4] [--json out/gpu_step.json] [--profile]

Random weights of the published shapes, bf16 or rounded: fp8 and int8 as `--quantization` does, int4 with groups of 128
as in GPTQ's checkpoints. Each decode figure is the median of five timings of replays of one CUDA
graph; `floor` is what reading the weights and the live keys and values once would take at the measured copy rate.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from bench.gpu_floors import Floors
from model import KvPool, Qwen2Config, Qwen2ForCausalLM
from model.gpu.decode_step import DecodeStep
from model.gpu.mixed_step import MixedInputs, MixedStep
from model.gpu.state import RowState
from model.gpu.weights import GpuWeights
from model.kernels.prefill_attention import list_tiles
from model.kv_pool import kv_block_bytes
from model.linear import Linear, WeightFormat
from model.quantization.rounding import round_to_groups

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
}
DECODES = [(1, 256), (8, 256), (32, 256), (128, 256), (256, 256), (256, 560), (1, 8192), (16, 8192), (1, 30000)]
PREFILLS = [(1, 16), (1, 512), (1, 2048), (1, 8192), (8, 2048)]
BLOCK_SIZE = 16


def config_of(shape: str) -> Qwen2Config:
    """The published shape's configuration."""
    D, I, layers, N, K, V, tied = SHAPES[shape]
    return Qwen2Config.from_dict(
        {
            "model_type": "qwen2", "hidden_size": D, "intermediate_size": I, "num_hidden_layers": layers,
            "num_attention_heads": N, "num_key_value_heads": K, "vocab_size": V, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied,
        }
    )  # fmt: skip


WEIGHTS = {
    "bf16": WeightFormat.BF16,
    "fp8": WeightFormat.FP8,
    "int8": WeightFormat.INT8,
    "int4": WeightFormat.BF16,
}
"""How the model's weights are taken; int4 ones are rounded before."""


def round_to_int4(model: Qwen2ForCausalLM) -> None:
    """Every matrix of the layers, as a GPTQ checkpoint would hold it."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.hold(round_to_groups(module.weight.data, bits=4, group_size=128))


def random_model(config: Qwen2Config) -> Qwen2ForCausalLM:
    """Weights drawn on the device: fast, and of a scale that keeps activations finite."""
    model = Qwen2ForCausalLM(config, dtype=torch.bfloat16, device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
    return model


class Bench:
    """The steps of one shape over a pool of random keys and values."""

    def __init__(
        self,
        shape: str,
        *,
        weights: str = "bf16",
        kv_dtype: torch.dtype = torch.bfloat16,
        num_rows: int = 256,
        pool_tokens: int = 300_000,
        max_tokens: int = 16384,
    ) -> None:
        self.config = config_of(shape)
        self.weight_bytes, taken = take_weights(random_model(self.config), weights)
        self.num_blocks = min(pool_tokens // BLOCK_SIZE, blocks_that_fit(self.config, kv_dtype))
        self.kv = KvPool(self.config, self.num_blocks + 1, BLOCK_SIZE, kv_dtype, "cuda")
        for pool in (*self.kv.k_pools, *self.kv.v_pools):
            pool.copy_(torch.randn(pool.shape, dtype=torch.bfloat16, device="cuda"))
        self.state = RowState(
            num_slots=num_rows, table_width=2048, scratch_block=self.num_blocks, device=torch.device("cuda")
        )
        self.decode = DecodeStep(
            taken, self.state, self.kv, max_batch=num_rows, vocab_size=min(151665, self.config.vocab_size)
        )
        self.mixed = MixedStep(self.decode, max_tokens=max_tokens)

    def holds(self, batch: int, context: int) -> bool:
        """Whether the pool is large enough for so many rows at this context, and for what they grow."""
        return batch * row_blocks(context) <= self.num_blocks

    def spread(self, batch: int, context: int) -> None:
        """Rows 0 … batch stand at `context` tokens, each over blocks of its own."""
        width = row_blocks(context)
        assert self.holds(batch, context), "the pool is too small"
        order = torch.randperm(self.num_blocks, device="cuda")[: batch * width]
        self.state.table_RM[:batch, :width] = order.view(batch, width).int()
        self.state.position_R[:batch] = context
        self.state.last_token_R[:batch] = torch.randint(0, 10000, (batch,), device="cuda", dtype=torch.int32)
        self.decode.rows_B[:batch] = torch.arange(batch, device="cuda", dtype=torch.int32)

    def floor_ms(self, batch: int, context: int, rate: float) -> float:
        """Reading everything once, at `rate` bytes a second."""
        per_token = self.kv.num_bytes / (self.kv.num_blocks * BLOCK_SIZE)
        return (self.weight_bytes + batch * context * per_token) / rate * 1e3


def row_blocks(context: int) -> int:
    """Blocks of a row that begins at this context."""
    return -(-(context + 512) // BLOCK_SIZE)


def blocks_that_fit(config: Qwen2Config, dtype: torch.dtype) -> int:
    """Blocks that nine tenths of the device's free memory hold."""
    return int(0.9 * torch.cuda.mem_get_info()[0]) // kv_block_bytes(config, block_size=BLOCK_SIZE, dtype=dtype)


def take_weights(model: Qwen2ForCausalLM, weights: str) -> tuple[int, GpuWeights]:
    """Bytes that a step reads of them, and the weights themselves."""
    if weights == "int4":
        round_to_int4(model)
    taken = GpuWeights.take(model, max_positions=32768, weight_format=WEIGHTS[weights])
    linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
    plain = sum(module.weight.numel() * 2 for module in linears if hasattr(module, "weight"))
    head = model.config.vocab_size * model.config.hidden_size * 2
    return plain + sum(module.packed_bytes for module in linears) + head, taken


def capture(bench: Bench, batch: int) -> torch.cuda.CUDAGraph:
    """A graph of one decode step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            bench.decode.run(batch)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.decode.run(batch)
    return graph


def elapsed_ms(run: object, count: int) -> float:
    """Milliseconds per call, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()  # type: ignore[operator]
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def copy_rate() -> float:
    """Bytes a second of a large device copy, read and written bytes counted."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return (
        2
        * source.numel()
        * 4
        / (statistics.median(elapsed_ms(lambda: target.copy_(source), 5) for _ in range(5)) / 1e3)
    )


def time_decode(bench: Bench, batch: int, context: int, temperature: float) -> float:
    """Median milliseconds of a step at about this context."""
    bench.spread(batch, context)
    bench.state.temperature_R.fill_(temperature)
    graph = capture(bench, batch)
    times = []
    for _ in range(5):
        bench.state.position_R[:batch] = context
        graph.replay()
        times.append(elapsed_ms(graph.replay, 50))
    return statistics.median(times)


def prefill_inputs(bench: Bench, num_prompts: int, length: int) -> MixedInputs:
    """A step of so many whole prompts."""
    bench.spread(num_prompts, length)
    host = np.arange(num_prompts * length, dtype=np.int32)
    rows, positions = host // length, host % length
    tiles = list_tiles((row, row * length, 0, length) for row in range(num_prompts))

    def device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).cuda()

    return MixedInputs(
        num_decodes=0, ids_T=device(host * 7919 % 10000), row_T=device(rows), position_T=device(positions),
        tiles_W4=device(tiles), last_S=device(np.arange(1, num_prompts + 1) * length - 1),
        rows_S=device(np.arange(num_prompts)), ended_E=device(np.arange(num_prompts)),
        position_E=device(np.full(num_prompts, length - 1)),
    )  # fmt: skip


def time_prefill(bench: Bench, num_prompts: int, length: int) -> float:
    """Median milliseconds of whole prompts in one step, launched kernel by kernel, to the first tokens on the host."""
    inputs = prefill_inputs(bench, num_prompts, length)
    bench.mixed.run(inputs)
    torch.cuda.synchronize()
    return statistics.median(elapsed_ms(lambda: bench.mixed.run(inputs), 3) for _ in range(5))


def profile(bench: Bench, batch: int, context: int) -> None:
    """Microseconds of each kernel in one step."""
    bench.spread(batch, context)
    graph = capture(bench, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    print(f"-- kernels of a step, batch {batch}, context {context}")
    for event in sorted(found.key_averages(), key=lambda event: -event.device_time_total)[:12]:
        print(f"  {event.device_time_total / 5:9.1f} us {event.count / 5:6.0f} x  {event.key[:100]}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["0.5B"])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bf16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    rate = copy_rate()
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": rate}
    for shape in arguments.shape:
        for weights in arguments.weights:
            name = shape if weights == "bf16" else f"{shape} {weights}"
            report[name] = measure(shape, rate, weights=weights, with_profile=arguments.profile)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1))


def measure(shape: str, rate: float, *, weights: str = "bf16", with_profile: bool) -> dict[str, float]:
    """All figures of one shape."""
    bench = Bench(shape, weights=weights)
    floors = Floors(config=bench.config, bytes_per_s=rate)
    figures: dict[str, float] = {}
    print(f"{shape}, {weights}: copy {rate / 1e12:.2f} TB/s, weights {bench.weight_bytes / 1e9:.2f} GB")
    for batch, context in DECODES:
        if not bench.holds(batch, context):
            print(f"  decode {batch:4d} x {context:5d}  does not fit into this device's memory", flush=True)
            continue
        greedy, drawn = (time_decode(bench, batch, context, temperature) for temperature in (0.0, 0.6))
        floor = bench.floor_ms(batch, context, rate)
        figures[f"decode {batch}x{context} floor"] = floor
        figures[f"decode {batch}x{context}"] = greedy
        figures[f"decode {batch}x{context} sampled"] = drawn
        line = f"  decode {batch:4d} x {context:5d}  {greedy:7.3f} ms  sampled {drawn:7.3f}"
        print(f"{line}  floor {floor:6.3f}  {floor / greedy:4.0%}", flush=True)
    for prompts, length in PREFILLS:
        ms, floor = time_prefill(bench, prompts, length), floors.prefill_ms([length] * prompts)
        figures[f"prefill {prompts}x{length}"] = ms
        figures[f"prefill {prompts}x{length} floor"] = floor
        line = f"  prefill {prompts:3d} x {length:5d}  {ms:7.2f} ms  {prompts * length / ms * 1e3:10.0f} tok/s"
        print(f"{line}  floor {floor:7.2f}  {floor / ms:4.0%}", flush=True)
    if with_profile:
        for batch, context in ((1, 256), (32, 256), (256, 560)):
            profile(bench, batch, context)
    return figures


if __name__ == "__main__":
    with torch.inference_mode():
        main()
