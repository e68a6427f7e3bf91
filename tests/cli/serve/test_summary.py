from dataclasses import replace

from rich.console import Console

from octavo.cli.serve.serve import with_gateways
from octavo.cli.serve.summary import ModelSummary, ServiceSummary, boxed, plain
from octavo.cli.settings.groups import ServeSettings

MODEL = ModelSummary(
    name="m", device="cuda", dtype="bfloat16", num_workers=2, num_blocks=1000, block_size=16, max_model_len=32768
)
SUMMARY = ServiceSummary(
    address="127.0.0.1:50051",
    admin_address="127.0.0.1:7",
    metrics=[("gateway-0", "127.0.0.1:9090")],
    models=[MODEL],
    ready_after_s=3.14,
)
PLAIN = """\
Octavo is ready after 3.1 s
  gRPC:     127.0.0.1:50051
  admin:    127.0.0.1:7
  metrics:  http://127.0.0.1:9090/metrics  (gateway-0)
  model:    m  (cuda, bfloat16, 2 workers)
  KV pool:  1,000 blocks × 16 = 16,000 tokens
  room for: 3 requests of 4,096 tokens at once
  try:      octavo chat"""


def test_plain_lines_tell_everything() -> None:
    assert plain(SUMMARY) == PLAIN


def test_it_tells_how_many_gateways_were_chosen_and_why() -> None:
    chosen, why = with_gateways(ServeSettings(model=("a", "b")), 16, on_gpu=True)
    assert chosen.num_gateways == 7
    assert "\n  gateways: 7, beside a GPU with 16 cores (--gateways)\n" in plain(replace(SUMMARY, gateways=why))
    chosen, why = with_gateways(ServeSettings(), 4, on_gpu=False)
    assert (chosen.num_gateways, why) == (1, "1, since the model computes on the 4 cores (--gateways)")


def test_it_names_the_live_page() -> None:
    assert "\n  page:     http://127.0.0.1:50080/\n" in plain(replace(SUMMARY, page="http://127.0.0.1:50080/"))


def test_the_box_tells_the_same() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(boxed(SUMMARY))
    text = console.export_text()
    for line in PLAIN.splitlines()[1:]:
        label, _, value = line.strip().partition(":")
        assert label in text
        assert value.strip() in text
    console.file.close()


def test_a_request_that_ends_inside_a_block_takes_it_whole() -> None:
    odd = ModelSummary(
        name="m", device="cpu", dtype="float32", num_workers=1, num_blocks=14, block_size=16, max_model_len=100
    )
    assert (odd.example_tokens, odd.num_requests) == (100, 2)


def test_it_names_what_multiplies_where_a_worker_said_it() -> None:
    said = replace(SUMMARY, models=[replace(MODEL, products="own kernels (AVX2)")])
    assert "\n  products: own kernels (AVX2)\n" in plain(said)


def test_the_line_to_copy_names_what_differs_from_the_defaults() -> None:
    other = ServiceSummary(address="10.0.0.1:6", admin_address=None, metrics=[], models=[MODEL, MODEL], ready_after_s=0)
    assert other.client_line == "octavo chat --host 10.0.0.1 --port 6 --model-name m"


def test_what_a_worker_warned_of_is_in_the_summary() -> None:
    noted = replace(SUMMARY, models=[replace(MODEL, notes=("max_model_len is 262144, not the 1010000",))])
    assert "  note:     max_model_len is 262144, not the 1010000" in plain(noted)
