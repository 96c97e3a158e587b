"""Run a benchmark, or write the pages: `python -m benchmarks NAME [options]`. Without a name it
lists all of them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

BENCHMARKS = {
    # on the CPU
    "peak": "benchmarks.cpu.peak",
    "compile_time": "benchmarks.cpu.compile_time",
    "verdicts": "benchmarks.cpu.verdicts",
    "resnet50": "benchmarks.cpu.resnet50",
    "session_overhead": "benchmarks.cpu.session_overhead",
    "same_engine": "benchmarks.cpu.same_engine",
    "synthetic_clock": "benchmarks.cpu.synthetic_clock",
    "pitfalls": "benchmarks.cpu.pitfalls",
    "calibration_memory": "benchmarks.cpu.calibration_memory",
    "calibration": "benchmarks.cpu.calibration",
    "few_bits": "benchmarks.cpu.few_bits",
    "plain_attention": "benchmarks.cpu.plain_attention",
    "advice": "benchmarks.cpu.advice.advice",
    "language_models": "benchmarks.language.language_models",
    "revisions": "benchmarks.cpu.revisions",
    # of the service
    "service_memory": "benchmarks.serving.service_memory",
    "json_beside_binary": "benchmarks.serving.json_beside_binary",
    "serving": "benchmarks.serving.serving",
    "soak": "benchmarks.serving.soak",
    "soak_faults": "benchmarks.faults.soak_faults",
    "cluster_faults": "benchmarks.faults.cluster.cluster_faults",
    "simulated_hosts": "benchmarks.faults.cluster.simulated_hosts",
    "perf_analyzer": "benchmarks.serving.perf_analyzer",
    "image_size": "benchmarks.serving.image_size",
    # on a GPU
    "tensorrt_compile": "benchmarks.gpu.tensorrt_compile",
    "gpu_models": "benchmarks.gpu.gpu_models",
    "transfers": "benchmarks.gpu.transfers",
    "language_gpu": "benchmarks.language.language_gpu",
    # of what limits whole runs
    "host_to_host": "benchmarks.limits.host_to_host",
    "attention_lengths": "benchmarks.limits.attention_lengths",
    "resnet_throughput": "benchmarks.limits.resnet_throughput",
    "serving_ceiling": "benchmarks.limits.serving_ceiling",
    "replicas": "benchmarks.limits.replicas",
    "two_gpus": "benchmarks.limits.two_gpus",
    # several, and their pages
    "run_all": "benchmarks.run_all",
    "pages": "benchmarks.pages.write",
}
"""The module of each name. Its `main` takes the words behind the name."""

QUESTIONS = {
    "peak": "How fast does this machine multiply matrices and copy memory?",
    "compile_time": "How long does the demo's compile take, with an empty and with a full store?",
    "verdicts": "What does a compile with default candidates say of several architectures?",
    "resnet50": "How much faster than PyTorch eager is the best engine of ResNet-50?",
    "session_overhead": "What does our Session cost over a direct call of the library?",
    "same_engine": "Does the interval of an engine against itself hold 1?",
    "synthetic_clock": "How often is the interval of a ratio right, on hosts of every kind?",
    "pitfalls": "What do the usual mistakes of measuring cost on this host?",
    "calibration_memory": "Does the memory of calibration grow with the number of samples?",
    "calibration": "How does int8 accuracy depend on samples and calibration method?",
    "few_bits": "What do weights in 4 or 8 bits and SmoothQuant save and cost?",
    "plain_attention": "Is attention that is written plainly faster on the CPU?",
    "advice": "Does an engine gain what an advice promises?",
    "language_models": "How fast do language models answer, beside transformers and llama.cpp?",
    "revisions": "Is this checkout slower than another one?",
    "service_memory": "How much memory do the server and a job take?",
    "json_beside_binary": "What do long JSON requests cost short binary ones?",
    "serving": "What does serving cost, beside six other servers?",
    "soak": "Does the service lose, mix up or leak anything under load?",
    "soak_faults": "Does the service lose anything while its host fails?",
    "cluster_faults": "Do several servers lose anything while hosts and networks fail?",
    "simulated_hosts": "How many hosts can share one PostgreSQL?",
    "perf_analyzer": "Does Triton's perf_analyzer run against the service as it is?",
    "image_size": "How large are the images, and how soon are they ready?",
    "tensorrt_compile": "What does TensorRT make of the three example plans?",
    "gpu_models": "How fast are our engines beside plain TensorRT and PyTorch?",
    "transfers": "How long does the way into the GPU take, beside the bus itself?",
    "language_gpu": "How near to the GPU's memory does decoding of language models come?",
    "host_to_host": "How fast are whole runs from host to host, beside PyTorch at its best?",
    "attention_lengths": "What does attention in one kernel save, by the number of tokens?",
    "resnet_throughput": "How many images per second does ResNet-50 in int8 reach on this GPU?",
    "serving_ceiling": "How much goes through the server, and what binds?",
    "replicas": "What does a proxy cost, and how does the rate grow with servers behind it?",
    "two_gpus": "How much more does one deployment answer on two GPUs than on one?",
    "run_all": "What do all benchmarks of `make bench` find here?",
    "pages": "None: it writes the pages and figures of docs/ from the results.",
}


def main(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        show_benchmarks()
        return
    name, *rest = words
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=3)
        hint = f"near it: {', '.join(near)}; " if near else ""
        sys.exit(f"no benchmark is named '{name}'\n  next: {hint}`python -m benchmarks` lists them")
    run: Callable[[Sequence[str]], None] = importlib.import_module(BENCHMARKS[name]).main
    run(rest)


def show_benchmarks() -> None:
    """Print every name with the question that it answers."""
    print("python -m benchmarks NAME [options]     (NAME --help says more)\n")
    width = max(map(len, QUESTIONS))
    for name, question in QUESTIONS.items():
        print(f"{name:{width}}  {question}")


if __name__ == "__main__":
    main(sys.argv[1:])
