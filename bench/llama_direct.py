"""Decoding beside llama.cpp's library itself: this server through HTTP, llama.cpp in a process of its own without one.

    python bench/llama_direct.py --python PYTHON                          # PYTHON: one with llama-cpp-python installed
    python bench/llama_direct.py --python PYTHON --streams 1,8 --pairs 10 --json out.json

Both read the same GGUF file with the same threads, hold the same prompts in their KV caches, and decode greedily past the end
of text; llama.cpp all streams in one batch a step. A value is tokens a second from the first token of the first stream to the
last of the last. Pairs, ratios and intervals as in ``tenuto bench engine``. llama.cpp answers on its standard output, so this
file runs in both processes and imports nothing of the project before it knows in which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

UBATCH = 512


class Library:
    """llama.cpp behind ctypes: a model, a context, one batch. Sequence n of the KV memory holds prompt n."""

    def __init__(self, model: str, streams: int, context: int, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * context, streams
        params.n_batch = params.n_ubatch = UBATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self._held: list[int] = []

    def hold(self, prompts: list[list[int]]) -> None:
        """Fills the KV memory with all but the last token of each prompt."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, True)
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt) - 1, UBATCH):
                part = prompt[start : min(start + UBATCH, len(prompt) - 1)]
                self._step([(token, start + n, sequence, False) for n, token in enumerate(part)])
        self._held = [len(prompt) - 1 for prompt in prompts]

    def decode(self, last: list[int], count: int) -> float:
        """Tokens a second of ``count`` greedy tokens after each prompt; ``last``: the prompts' last tokens."""
        import numpy as np

        tokens, began = last, 0.0
        for n in range(count):
            self._step([(token, self._held[s] + n, s, True) for s, token in enumerate(tokens)])
            rows = [self._api.llama_get_logits_ith(self._context, s) for s in range(len(tokens))]
            tokens = [int(np.ctypeslib.as_array(row, (self._words,)).argmax()) for row in rows]
            began = began or time.perf_counter()
        took = time.perf_counter() - began
        memory = self._api.llama_get_memory(self._context)
        for sequence, held in enumerate(self._held):
            self._api.llama_memory_seq_rm(memory, sequence, held, -1)
        return (count - 1) * len(last) / took

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = token, position, wanted
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
        if status := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with status {status}")


def answer(model: str, streams: int, context: int, threads: int) -> int:
    """The process with llama.cpp: a request a line in, an answer a line out."""
    library = Library(model, streams, context, threads)
    for line in sys.stdin:
        asked = json.loads(line)
        if "hold" in asked:
            library.hold(asked["hold"])
            print("{}", flush=True)
        else:
            print(json.dumps(library.decode(asked["last"], asked["tokens"])), flush=True)
    return 0


class Other:
    """The process with llama.cpp, from here."""

    def __init__(self, python: str, model: Path, streams: int, context: int, threads: int) -> None:
        command = [python, __file__, "--answer", str(model), *map(str, (streams, context, threads))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the process with llama.cpp ended; is llama-cpp-python installed for --python?")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from tenuto_server.bench.demo import about
    from tenuto_server.bench.measures import decode_rate
    from tenuto_server.bench.paired import METHOD, ratio_of
    from tenuto_server.bench.prompts import Prompts
    from tenuto_server.bench.serving import serving
    from tenuto_server.model.load import resolve_model

    model = resolve_model(args.model).path
    rows = []
    with serving(args, ("--speculate", "0", "--device-bytes", "1GiB", "--host-bytes", "0")) as served:
        prompts = Prompts(served.endpoint)
        known = [prompts.take(args.context) for _ in range(max(args.streams))]
        for prompt in known:
            served.endpoint.stream(prompt, 1)
        threads = args.threads or os.cpu_count() or 1
        other = Other(args.python, model, max(args.streams), args.context + args.tokens + 16, threads)
        try:
            other.ask(hold=known)
            for streams in args.streams:
                ours, theirs = [], []
                for number in range(args.pairs):
                    for mine in (True, False) if number % 2 == 0 else (False, True):
                        if mine:
                            ours.append(decode_rate(served.endpoint, known[:streams], args.tokens))
                        else:
                            theirs.append(other.ask(last=[p[-1] for p in known[:streams]], tokens=args.tokens))
                ratio = ratio_of([a / b for a, b in zip(ours, theirs, strict=True)])
                rows.append({"streams": streams, "ours": ours, "theirs": theirs, "ratio": str(ratio)})
                middle = [sorted(values)[len(values) // 2] for values in (ours, theirs)]
                print(
                    f"{streams:3} streams: {middle[0]:6.1f} tokens/s here, {middle[1]:6.1f} llama.cpp, {ratio}",
                    flush=True,
                )
        finally:
            other.close()
    return {"about": about(), "interval": METHOD, "arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}


def main() -> int:
    if sys.argv[1:2] == ["--answer"]:
        return answer(sys.argv[2], *map(int, sys.argv[3:6]))
    from tenuto_server.bench.serving import add_server_options

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", required=True, help="the interpreter of an environment with llama-cpp-python")
    add("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8], help="(default: 1,8)")
    add("--context", type=int, default=512, help="tokens of every prompt (default: 512)")
    add("--tokens", type=int, default=64, help="decoded by each stream (default: 64)")
    add("--pairs", type=int, default=10)
    add("--json", type=Path, metavar="FILE", help="write all values there")
    add_server_options(parser)
    args = parser.parse_args()
    document = measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
