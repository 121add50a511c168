#!/bin/bash
# Measure on a GPU that is lent for minutes: bash tools/lease.sh COMMIT SECONDS PART...
#
# It ends within so many seconds, and leaves everything in $OUT/results.tar.gz. Parts run in the order given, each for as
# long as there is time; what a part has measured is packed before the next one begins. See on_a_gpu.md.
COMMIT=$1 LIMIT=$2
shift 2
TOOLS=tools BENCH=examples/benchmarks RESULTS=$OUT/results
mkdir -p "$RESULTS"
export PYTHONPATH=$PWD:/tmp/site PATH=/tmp/site/bin:$PATH PYTHONUNBUFFERED=1

left() { echo $((LIMIT - SECONDS - ${1:-5})); }  # seconds, less those that are kept for what follows
at_most() { local wanted=$1 most; most=$(left); shift; timeout -s INT -k 10 $((wanted < most ? wanted : most)) "$@"; }

install() {  # what the machine lacks: rivals, and what tests of the command line need
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site $TOOLS/wheels/*.whl
}

machine() {
    (grep Mem /proc/meminfo; nproc; lscpu; nvidia-smi; python3 -m pip list 2>/dev/null) > "$RESULTS/machine.txt" 2>&1
}

compile() {  # rivals' kernels, beside the next part; an interrupted compilation leaves a lock that others wait for
    rm -f ~/.cache/torch_extensions/*/cpu_adam/lock ~/.cache/trainstream/*/lock
    {
        timeout 120 python3 -c "import trainstream"
        timeout 250 python3 -c "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder; CPUAdamBuilder().load()"
    } > "$RESULTS/compile.log" 2>&1 &
    COMPILE=$!
}

tests() {  # all that need a GPU
    at_most 150 python3 -m pytest tests/gpu -n 8 -q --color=no --durations 10 > "$RESULTS/gpu_tests.log" 2>&1
    grep -E "^(FAILED|ERROR)|passed|failed" "$RESULTS/gpu_tests.log" | cut -c1-300
}

memory_tests() {  # those of them whose answer depends on how fast the device is
    at_most 45 python3 -m pytest tests/gpu/test_streams.py tests/gpu/test_activations.py -n 8 -q --color=no > "$RESULTS/gpu_memory_tests.log" 2>&1
    grep -E "^(FAILED|ERROR)|passed|failed" "$RESULTS/gpu_memory_tests.log" | cut -c1-300
}

overhead() { at_most 60 python3 $TOOLS/overhead.py --device cuda --json "$RESULTS/overhead.json"; }

bench() {  # NAME SECONDS WORKLOADS SYSTEMS OPTION...
    [ -n "$COMPILE" ] && wait "$COMPILE"
    local most; most=$(left 10)
    local seconds=$(($2 < most ? $2 : most))
    timeout -k 5 $((seconds + 5)) python3 $BENCH/bench.py run --workloads $3 --systems $4 --rounds 1 --steps 6 --host-memory 50GB --revision "$COMMIT" --time-limit "$seconds" --output "$RESULTS/$1.json" "${@:5}" 2>&1 | grep -v -i warning | cut -c1-300
}

ours() { bench ours 130 qwen2.5-1.5b-8k "superpipeline-recompute device superpipeline"; }

memory() {  # in all budgets, and the picture of it
    bench memory 580 qwen2.5-1.5b-8k-memory "superpipeline device trainstream deepspeed-zero3 trainstream-bf16 superpipeline-least"
    python3 $BENCH/plot_memory.py "$RESULTS/memory.json" --plan --output "$RESULTS/time_over_memory.svg"
}

fsdp2() { bench fsdp2 150 qwen2.5-1.5b-8k fsdp2 --warm-up 1 --steps 2; }  # after a minute it had not ended with six

timelines() {
    timeout -k 5 120 python3 $TOOLS/timelines.py --workload llama-3.1-8b-24g-8k --thousands 16 8 4 1 --unclipped 8 --host-gigabytes 100 --revision "$COMMIT" --output "$RESULTS" > "$RESULTS/timelines.log" 2>&1
    tail -8 "$RESULTS/timelines.log" | cut -c1-900
}

machine
for part in "$@"; do
    echo "--- $part, after $SECONDS s"
    $part
    tar czf "$OUT/results.tar.gz" -C "$OUT" results
done
rm -rf "$RESULTS"  # few files can be returned
echo "--- done, after $SECONDS s"
