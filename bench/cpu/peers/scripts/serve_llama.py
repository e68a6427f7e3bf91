"""llama.cpp as one of the sides; runs in the peers' environment, one request per line:
`python serve_llama.py FILE.gguf THREADS CLOCK`.

Sequences are batched as in llama.cpp's own server: each step has one token of every sequence that decodes, then prompt
tokens, 512 in total.
"""

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MAX_SEQUENCES, MAX_BATCH, CONTEXT = 32, 512, 32 * 516


class Model:
    """A model and a context of MAX_SEQUENCES sequences."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        silent = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # the library keeps a pointer to it
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, MAX_BATCH, MAX_BATCH
        params.n_seq_max, params.n_threads, params.n_threads_batch = MAX_SEQUENCES, threads, threads
        params.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(MAX_BATCH, 0, 1)

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        """Answer the prompts greedily; seconds."""
        start_s = CLOCKS[sys.argv[3]]()
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        done, known, given = [0] * len(prompts), [list(prompt) for prompt in prompts], [0] * len(prompts)
        while any(count < wanted for count, wanted in zip(given, outputs, strict=True)):
            sampled: list[int] = []
            self._batch.n_tokens = 0
            alive = [s for s in range(len(prompts)) if given[s] < outputs[s]]
            for s in sorted(alive, key=lambda s: given[s] == 0):  # sequences that decode come first
                num = min(len(known[s]) - done[s], MAX_BATCH - self._batch.n_tokens)
                for position in range(done[s], done[s] + num):
                    self._add(known[s][position], position, s, is_sampled=position == len(known[s]) - 1)
                done[s] += num
                if num and done[s] == len(known[s]):
                    sampled.append(s)
            if llama.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")
            self._sample(sampled, known, given)
        return CLOCKS[sys.argv[3]]() - start_s

    def _add(self, token: int, position: int, sequence: int, *, is_sampled: bool) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = sequence, is_sampled
        batch.n_tokens = at + 1

    def _sample(self, sampled: list[int], known: list[list[int]], given: list[int]) -> None:
        rows = [at for at in range(self._batch.n_tokens) if self._batch.logits[at]]
        for s, at in zip(sampled, rows, strict=True):
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, at), (self._vocab,))
            known[s].append(int(logits.argmax()))
            given[s] += 1


def main() -> None:
    """Print what this is, then for each line {"prompts": […], "outputs": […]} how long it took."""
    model = Model(sys.argv[1], int(sys.argv[2]))
    features = llama.llama_print_system_info().decode()
    _say({"name": f"llama.cpp (llama-cpp-python {llama.__version__})", "version": features})
    for line in sys.stdin:
        asked = json.loads(line)
        _say({"seconds": model.serve(asked["prompts"], asked["outputs"])})


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
