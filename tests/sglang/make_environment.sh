#!/bin/sh
# Make the environment of tests/sglang/test_engine.py: SGLang beside the CPU build of torch that
# vLLM's CPU build brings, without what runs on a GPU alone.
#   tests/sglang/make_environment.sh FOLDER
#   SGLANG_TEST_PYTHON=FOLDER/bin/python python -m pytest tests/sglang --exhaustive
set -eu
[ -x "$1/bin/python" ] || "$(dirname "$0")/../vllm/make_environment.sh" "$1"
"$1/bin/pip" install --no-deps sglang==0.5.23 torch_memory_saver
"$1/bin/pip" install apache-tvm-ffi==0.1.11 dill gguf ipython orjson python-multipart soundfile zstandard
