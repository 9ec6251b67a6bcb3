#!/usr/bin/env bash
# Every row of the tables, most valuable first, on one H200 with 16 cores and 128 GiB of host memory.
#
#   benchmarks/all.sh FOLDER [NAME...]        append rows to FOLDER/*.jsonl; only the named entries
#   benchmarks/all.sh --list                  names and expected minutes
#
# An entry that breaks off is resumed by running it again: what FOLDER has of this commit is left out. A failed entry does not
# stop the others; the exit status says whether there was one. Settings: PYTHON; COMMIT where the code came without its history.
set -uo pipefail
cd "$(dirname "$0")/.."

list=false
if [ "${1:-}" = --list ]; then list=true; shift; fi
folder=${1:-benchmarks/results}
[ $# -gt 0 ] && shift
names=" $* "
failed=""

run() { # name, expected minutes, results file, program, options...
    local name=$1 minutes=$2 file=$3 program=$4
    shift 4
    if $list; then printf '%-16s %3s min  %s.py %s\n' "$name" "$minutes" "$program" "$*"; return; fi
    if [ "$names" != "  " ] && [[ "$names" != *" $name "* ]]; then return; fi
    mkdir -p "$folder"
    echo "== $name (about $minutes min)" >&2
    "${PYTHON:-python3}" "benchmarks/$program.py" "$@" --resume --out "$folder/$file.jsonl" ${COMMIT:+--commit "$COMMIT"} ||
        failed="$failed $name"
}

rows="--rows 128 --row-tokens 1024"
stream="--model qwen2.5-7b $rows --micro-batch-rows 32"

# The targets. The resident baseline and our 3B row belong together: one machine, one run.
run 3b-resident 4 step resident --case 3b-resident --model qwen2.5-3b $rows --micro-batch-rows 16
run 3b-disk 4 step step --case 3b-disk --model qwen2.5-3b $rows --auto 1 --disk-units 12 --disk-folder .
run 3b-disk-all 8 step step --case 3b-disk-all --model qwen2.5-3b $rows --auto 1 --disk-units 99 --disk-folder . --steps 3
run 3b-free 5 step step --case 3b-free --model qwen2.5-3b $rows --auto 1
run 7b-free 7 step step --case 7b-free --model qwen2.5-7b $rows --auto 1
run 7b-stream 11 step step --case 7b-stream-44 $stream --activation-budget 0.0 --variants "case=7b-stream-90,turn_layers=12,num_slots=15;case=7b-full-rows;case=7b-packed-250,sample_tokens=250"
run 7b-adam8 6 step step --case 7b-adam8 $stream --activation-budget 0.0 --optim adamw_8bit
run 7b-16k 5 step step --case 7b-16k --model qwen2.5-7b --rows 16 --row-tokens 1024 --auto 1
run 7b-muon 7 step step --case 7b-muon $stream --activation-budget 0.0 --optim muon
run 7b-muon-free 5 step step --case 7b-muon-free --model qwen2.5-7b $rows --auto 1 --optim muon
run 14b-adam8-free 9 step step --case 14b-adam8-free --model qwen2.5-14b $rows --auto 1 --optim adamw_8bit
run 14b-adam8 9 step step --case 14b-adam8 --model qwen2.5-14b $rows --micro-batch-rows 32 --num-waves 2 --activation-budget 0.1 --optim adamw_8bit --steps 3
run 32b-lean 12 step step --case 32b-lean --model qwen2.5-32b --rows 64 --row-tokens 1024 --auto 1 --optim adamw_8bit --master-weights bf16 --steps 3
run 14b-free 10 step step --case 14b-free --model qwen2.5-14b $rows --auto 1
run 7b-arrival 6 step step --case 7b-arrival --model qwen2.5-7b $rows --auto 1 --device-memory 60 --on-arrival 1
run 7b-24gib 7 step step --case 7b-24gib --model qwen2.5-7b $rows --auto 1 --device-memory 24
run 7b-10gib 8 step step --case 7b-10gib --model qwen2.5-7b $rows --auto 1 --device-memory 10
run 7b-24gib-8k 7 step step --case 7b-24gib-8k --model qwen2.5-7b --rows 16 --row-tokens 8192 --auto 1 --device-memory 24
run 7b-10gib-8k 8 step step --case 7b-10gib-8k --model qwen2.5-7b --rows 16 --row-tokens 8192 --auto 1 --device-memory 10
long="--model qwen2.5-7b --rows 1 --auto 1 --steps 1 --warmup 1"
run 7b-128k 7 step step --case 7b-128k $long --row-tokens 131072
run 7b-256k 9 step step --case 7b-256k $long --row-tokens 262144
run 7b-512k 12 step step --case 7b-512k $long --row-tokens 524288 --optim adamw_8bit --warmup 0 --host-memory 117
run 7b-512k-half 13 step step --case 7b-512k-half $long --row-tokens 524288 --layers 14 --optim adamw_8bit
run qwen3-30b-a3b 9 step step --case qwen3-30b-a3b --model qwen3-30b-a3b --layers 24 $rows --auto 1
run gpt-oss-120b 9 step step --case gpt-oss-120b --model gpt-oss-120b --layers 3 $rows --auto 1
run least-7b 3 step step --case least-7b --model qwen2.5-7b --layers 4 --rows 8 --row-tokens 4096 --auto 1 --device-memory 3.9
run gpt-oss-120b-24gib 4 step step --case gpt-oss-120b-24gib --model gpt-oss-120b --layers 2 $rows --auto 1 --device-memory 24

# What limits them.
run layer 6 layer layer --model qwen2.5-7b --row-tokens 1024 --micro-batch-rows 16,32 --budgets 0,0.1,0.3,0.5,0.7,1
run head 2 head head --model qwen2.5-7b --rows 32 --row-tokens 1024 --chunk-tokens 2048,4096,8192,16384
run attention 4 attention attention --row-tokens 1024,8192,32768,131072,262144 --kernels default,cudnn,flash
run link 1 link link
run adamw 2 adamw adamw --params 100e6 --threads 16 --format adamw,adamw_8bit,adamw_8bit-bf16,adamw-bf16,lion,lion_8bit,adafactor,sgd,muon,muon_8bit
run pages 2 pages pages --params 400e6 --threads 16
run curves 8 curves curves --shape smollm2-135m --rows 32 --row-tokens 512 --steps 300 --formats plain-bf16,adamw_torch,adamw_8bit,adamw-bf16,adamw_8bit-bf16,lion,adafactor,muon,sgd

# Studies.
run depth 9 sweep sweep depth --model qwen2.5-7b --activation-budget 0.0 --steps 3 --warmup 1
run ablation 7 sweep sweep ablation --tokens 32768 --micro-batch-tokens 32768 --model qwen2.5-7b --activation-budget 0.0 --steps 3 --warmup 1
run length 9 sweep sweep length --model qwen2.5-7b --activation-budget 0.0 --steps 2 --warmup 1
run width 9 sweep sweep width --tokens 65536 --model qwen2.5-7b --activation-budget 0.0 --steps 2 --warmup 1

[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
