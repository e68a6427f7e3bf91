"""OpenVINO GenAI's continuous batching as one of the sides; runs in the peers' environment, one request per line:
`python serve_openvino.py FILE.gguf THREADS CLOCK PRECISION`. PRECISION: of its arithmetic, f32 or bf16."""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Print what this is, then for each line {"prompts": […], "outputs": […]} how long it took."""
    path, threads, precision = sys.argv[1], int(sys.argv[2]), sys.argv[4]
    limits = genai.SchedulerConfig()
    limits.cache_size = 1
    limits.max_num_seqs = 32
    limits.max_num_batched_tokens = 512
    limits.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipe = genai.ContinuousBatchingPipeline(path, limits, "CPU", properties)
    _say({"name": f"OpenVINO GenAI {genai.get_version().split('-')[0]}", "version": ov.get_version()})
    for line in sys.stdin:
        asked = json.loads(line)
        start_s = CLOCKS[sys.argv[3]]()
        handles = []
        for index, (prompt, num_output) in enumerate(zip(asked["prompts"], asked["outputs"], strict=True)):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.min_new_tokens, config.ignore_eos = num_output, num_output, True
            config.do_sample, config.apply_chat_template = False, False
            ids = ov.Tensor(np.asarray([prompt], np.int64))
            handles.append(pipe.add_request(index, ids, config))
        while pipe.has_non_finished_requests():
            pipe.step()
        seconds = CLOCKS[sys.argv[3]]() - start_s
        counts = [len(handle.read_all()[0].generated_ids) for handle in handles]
        _say({"seconds": seconds} if counts == asked["outputs"] else {"error": f"gave {counts} tokens"})


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
