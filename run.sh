#!/usr/bin/env bash
# Runs every strategy on this machine, one after the other, and turns the logs into tables and charts.
# Needs nothing but Python 3.10: setup.sh makes the environment on first use. Works with macOS's bash 3.2.

usage() {
  cat << 'END'
usage: ./run.sh [OPTION...] [STRATEGY...] [-- FLAG...]

Trains GPTlite (or ResNet-18) with every strategy that this machine can run, or with those named, and
writes results/MACHINE/: a log per strategy, samples.csv, summary.csv, charts, machine.txt.

  --workload NAME         gptlite (default) or resnet, which is ResNet-18 on CIFAR-10, with data parallelism alone
  --nproc N               processes (default: one per GPU; 2 without a GPU)
  --steps N               optimizer steps (default: 20; 100 for resnet; without a GPU 60, 3 above baby, 20 for resnet)
  --model NAME            shape of GPTlite (default: gpt3-small; nano without a GPU)
  --batch-size N          samples per step, of all processes together (default: 256; without a GPU 16 or 4)
  --micro-batch-size N    samples per process and forward (default: 1, 8 for resnet; without a GPU 4, 1 above baby)
  --data PATH             the text to learn (default: Tiny Shakespeare), or the folder with CIFAR-10's files
  --nvme-path DIR         where zero3_nvme swaps to (default: the folder for temporary files)
  --timeout SECONDS       limit for one strategy (default: 3600; 900 for nano and baby without a GPU)
  --bucket-sizes          ZeRO 2 and 3 with buckets of 5e5, 5e7 and 5e8 elements in place of the strategies, into
                          results/MACHINE-buckets: what the buffers cost in memory
  --out DIR               folder of the results (default: results/MACHINE)
  --list                  print the names of the strategies
  --help                  print this
  -- FLAG...              further flags for every script, for example: -- --precision bf16 --eval-steps 10

A strategy that fails, runs out of memory, hangs or lacks something here is a row with its reason, and the
sweep goes on. Naming a few strategies measures these again, and keeps the other rows. CUDA_VISIBLE_DEVICES=
(empty) means no GPU; PYTHON=... names the interpreter to use. Exit code: 0 if every strategy trained or
was skipped, 1 if one did not, 2 for a wrong option, 130 or 143 if interrupted.
END
}

# ---- strategies -----------------------------------------------------------------------------------
# To add one: its name here, in the order of the tables and charts, and its line in describe().

STRATEGIES="ddp fsdp_no_shard fsdp_shard_grad_op fsdp_full_shard fsdp_hybrid_shard
  zero0 zero1 zero2 zero3 zero2_offload zero3_offload zero3_nvme
  tp tp_sp tp_dp pp_gpipe pp_1f1b pp_interleaved pp_zbv pp_1f1b_dp deepspeed_pp
  ddp_checkpointing ddp_activation_offload fsdp_checkpointing"
# Trained only when named. These send less than fp32 gradients and parameters, so that their losses differ:
LOSSY="ddp_bf16_hook ddp_fp16_hook ddp_powersgd_hook zeropp"
# And these, for --bucket-sizes, train as zero2 and zero3 do:
BUCKETS="zero2_bucket_5e5 zero2_bucket_5e7 zero2_bucket_5e8 zero3_bucket_5e5 zero3_bucket_5e7 zero3_bucket_5e8"

# What strategy $1 is: the script and its arguments, and what it needs here. Sets COMMAND and SHOWN, the
# command as run and as written in the results; PROCESSES; and REASON, if it cannot run on this machine.
describe() {
  PROCESSES=$NPROC COPIES= REASON=
  case $WORKLOAD-$1 in
    resnet-tp* | resnet-pp* | resnet-deepspeed_pp) REASON="cuts up GPTlite itself: $WORKLOAD has no such layers" && return ;;
    resnet-*_checkpointing) REASON="a block is computed twice: BatchNorm would take its running statistics twice" && return ;;
  esac
  case $1 in
    ddp)                with_torchrun train_ddp.py ;;
    fsdp_no_shard)      with_torchrun train_fsdp.py --sharding-strategy NO_SHARD ;;
    fsdp_shard_grad_op) with_torchrun train_fsdp.py --sharding-strategy SHARD_GRAD_OP ;;
    fsdp_full_shard)    with_torchrun train_fsdp.py --sharding-strategy FULL_SHARD ;;
    fsdp_hybrid_shard)  needs_mesh && with_torchrun train_fsdp.py --sharding-strategy HYBRID_SHARD --shard-size 2 ;;
    zero0)              needs_deepspeed && with_deepspeed zero0.json ;;
    zero1)              needs_deepspeed && with_deepspeed zero1.json ;;
    zero2)              needs_deepspeed && with_deepspeed zero2.json ;;
    zero3)              needs_deepspeed && with_deepspeed zero3.json ;;
    zero2_offload)      needs_ops CPUAdamBuilder && with_deepspeed zero2_offload.json ;;
    zero3_offload)      needs_ops CPUAdamBuilder && with_deepspeed zero3_offload.json ;;
    zero3_nvme)         needs_ops CPUAdamBuilder AsyncIOBuilder && needs_nvme && with_deepspeed zero3_nvme.json ;;
    tp)                 divides_heads && copies 1 && with_torchrun train_tp.py ;;
    tp_sp)              divides_heads && copies 1 && with_torchrun train_tp.py --sequence-parallel ;;
    tp_dp)              needs_mesh && copies 2 && with_torchrun train_tp.py --tensor-parallel-size 2 ;;
    pp_gpipe)           fits_layers 1 && copies 1 && with_torchrun train_pp.py --schedule GPipe ;;
    pp_1f1b)            fits_layers 1 && copies 1 && with_torchrun train_pp.py --schedule 1F1B ;;
    pp_interleaved)     fits_layers 2 && copies 1 && with_torchrun train_pp.py --schedule Interleaved1F1B ;;
    pp_zbv)             fits_layers 2 && copies 1 && with_torchrun train_pp.py --schedule ZBVZeroBubble ;;
    pp_1f1b_dp)         needs_mesh && copies 2 && with_torchrun train_pp.py --schedule 1F1B --pipeline-parallel-size 2 ;;
    deepspeed_pp)       needs_deepspeed && fits_layers 1 && copies 1 && with_deepspeed pp_zero1.json train_deepspeed_pp.py ;;
    ddp_checkpointing)  with_torchrun train_ddp.py --activation-checkpointing ;;
    ddp_activation_offload) with_torchrun train_ddp.py --activation-offload ;;
    fsdp_checkpointing) with_torchrun train_fsdp.py --activation-checkpointing ;;
    ddp_*_hook)         STEM=${1#ddp_} && with_torchrun train_ddp.py --comm-hook "${STEM%_hook}" ;;
    zeropp)             needs_cuda && needs_ops QuantizerBuilder && with_deepspeed zeropp.json ;;
    zero?_bucket_*)     needs_deepspeed && with_deepspeed "${1%%_*}.json" && with_flag --bucket-size "${1##*_}" ;;
    *) return 1 ;;
  esac
}

with_flag() {
  COMMAND+=("$@")
  SHOWN="$SHOWN $*"
}

# Tensor parallelism and pipelines: data-parallel copies of the model, all processes in 1, or in copies of 2 processes.
copies() {
  [ "$1" -eq 1 ] && COPIES=1 || COPIES=$((PROCESSES / 2))
}

with_torchrun() {
  COMMAND=("$PYTHON" -m torch.distributed.run --standalone "--nproc_per_node=$PROCESSES" "$@")
  show torchrun --standalone "--nproc_per_node=$PROCESSES" "$@"
}

with_deepspeed() { # --master_port: two sweeps at once must not meet on DeepSpeed's fixed port
  local config=ds_configs/$1 script=${2:-train_deepspeed.py}
  # Its launcher does not share a GPU, and takes GPU 0, 1, ... whatever CUDA_VISIBLE_DEVICES says: torchrun, then.
  if [ "$GPUS" -gt 0 ] && { [ "$PROCESSES" -gt "$GPUS" ] || [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; }; then
    with_torchrun "$script" --deepspeed_config "$config"
  else
    COMMAND=("$PYTHON" -m deepspeed.launcher.runner "--num_gpus=$PROCESSES" --master_port "$(free_port)"
      "$script" --deepspeed_config "$config")
    show deepspeed "--num_gpus=$PROCESSES" "$script" --deepspeed_config "$config"
  fi
  if [ "$config" = ds_configs/zero3_nvme.json ] && [ -n "$NVME" ]; then
    COMMAND+=(--nvme-path "$NVME")
    SHOWN="$SHOWN --nvme-path DIR"
  fi
}

free_port() {
  "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# HYBRID_SHARD shards in pairs and replicates between them: 4 processes at least. CPUs can be shared, GPUs not.
needs_mesh() {
  if [ "$GPUS" -eq 0 ]; then
    PROCESSES=$((NPROC < 4 ? 4 : NPROC + NPROC % 2))
  elif [ "$NPROC" -lt 4 ] || [ $((NPROC % 2)) -ne 0 ]; then
    REASON="needs an even number of processes, at least 4 (2 groups of 2 that shard); there are $NPROC"
  fi
  if [ -z "$REASON" ] && [ $((BATCH % (MICRO * PROCESSES))) -ne 0 ]; then
    REASON="needs $PROCESSES processes, and a batch of $BATCH does not divide into $PROCESSES micro-batches of $MICRO"
  fi
  [ -z "$REASON" ]
}

# Tensor parallelism gives each process whole heads: as many processes as divide them.
divides_heads() {
  HEADS=${HEADS:-$("$PYTHON" -c 'import sys, gptlite; print(gptlite.PRESETS[sys.argv[1]].n_head)' "$MODEL")}
  while [ $((HEADS % PROCESSES)) -ne 0 ]; do PROCESSES=$((PROCESSES - 1)); done
  [ "$PROCESSES" -gt 1 ] || REASON="needs a number of processes that divides the $HEADS heads of $MODEL"
  [ -z "$REASON" ]
}

# A pipeline has $1 stages per process, each at least one layer, and hands round whole rounds of micro-batches.
fits_layers() {
  LAYERS=${LAYERS:-$("$PYTHON" -c 'import sys, gptlite; print(gptlite.PRESETS[sys.argv[1]].n_layer)' "$MODEL")}
  while [ $(($1 * PROCESSES)) -gt "$LAYERS" ] || [ $((BATCH / MICRO % PROCESSES)) -ne 0 ]; do
    PROCESSES=$((PROCESSES - 1))
  done
  [ "$PROCESSES" -gt 1 ] || REASON="needs at least 2 processes, and a micro-batch and layers for each"
  [ -z "$REASON" ]
}

needs_cuda() {
  [ "$DEVICE" = cuda ] || REASON="ZeRO++ quantizes with a CUDA kernel: it needs NVIDIA GPUs"
  [ -z "$REASON" ]
}

needs_deepspeed() {
  REASON=$NO_DEEPSPEED
  [ -z "$REASON" ]
}

# DeepSpeed, and those of its C++ ops that are named. With PLANNING set it only notes the ops, in OPS, so that all
# that the sweep needs are compiled in one step, before the first run that needs one: that takes minutes on a
# machine's first use of them, which is no time of any strategy's.
needs_ops() {
  local op ops
  if [ -n "$PLANNING" ]; then
    OPS="$OPS $*"
    return 1
  fi
  needs_deepspeed || return 1
  if [ ! -e "$TEMP/ops" ]; then
    ops=$(printf '%s\n' $OPS | sort -u)
    echo "        DeepSpeed loads its C++ ops:" $ops
    echo "        On their first use on a machine they are compiled: that takes minutes, once."
    SECONDS=0
    attended "$PYTHON" machine.py ops $ops > "$TEMP/ops" 2>&1
    echo "        Ready after $SECONDS s."
  fi
  for op in "$@"; do
    [ -n "$REASON" ] || REASON=$(sed -n "s/^$op //p" "$TEMP/ops" | tail -1)
    [ -n "$REASON" ] || REASON="$op was not compiled: $(tail -1 "$TEMP/ops")"
    [ "$REASON" != ok ] || REASON=
  done
  [ -z "$REASON" ]
}

# A folder of this sweep's own for the swap files, so that none is left behind.
needs_nvme() {
  [ -n "$NVME_PATH" ] || return 0
  NVME=$(mktemp -d "$NVME_PATH/gptlite-swap-XXXXXX" 2> /dev/null) || REASON="cannot write to --nvme-path $(basename "$NVME_PATH")"
  [ -z "$REASON" ]
}

# ---- options --------------------------------------------------------------------------------------

fail() {
  echo "run.sh: error: $*" >&2
  exit 2
}

whole_number() { # flag, value
  case $2 in
    '' | *[!0-9]* | 0*) fail "$1 takes a whole number of at least 1, not '$2'" ;;
  esac
}

absolute() { # the path $1, also after the cd below
  case $1 in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
  esac
}

# SHOWN: the words of a command, without the paths of this machine, as a shell would take them.
show() {
  local word
  SHOWN=
  for word in "$@"; do
    case $word in
      /*) word=$(basename "$word") ;;
      -*=/*) word=${word%%=*}=$(basename "$word") ;;
    esac
    case $word in
      *[!A-Za-z0-9_./=:,+@%-]* | '') word=$(printf %q "$word") ;;
    esac
    SHOWN="$SHOWN${SHOWN:+ }$word"
  done
}

WORKLOAD=gptlite NPROC= STEPS= MODEL= BATCH= MICRO= DATA= NVME_PATH= TIMEOUT= OUT= NAMES= NVME= SUFFIX=
EXTRA=()
show ./run.sh "$@"
INVOCATION=$SHOWN
while [ $# -gt 0 ]; do
  case $1 in
    --*=*) # --flag=value is --flag value
      flag=${1%%=*} value=${1#*=}
      shift
      set -- "$flag" "$value" "$@"
      ;;
  esac
  case $1 in
    --workload | --nproc | --steps | --model | --batch-size | --micro-batch-size | --data | --nvme-path | --timeout | --out)
      [ $# -ge 2 ] || fail "$1 needs a value (see --help)"
      case $1 in
        --workload) WORKLOAD=$2 ;;
        --nproc) whole_number "$1" "$2" && NPROC=$2 ;;
        --steps) whole_number "$1" "$2" && STEPS=$2 ;;
        --model) MODEL=$2 ;;
        --batch-size) whole_number "$1" "$2" && BATCH=$2 ;;
        --micro-batch-size) whole_number "$1" "$2" && MICRO=$2 ;;
        --data) [ -r "$2" ] && { [ -f "$2" ] || [ -d "$2" ]; } || fail "cannot read the data $2" && DATA=$(absolute "$2") ;;
        --nvme-path) NVME_PATH=$(absolute "$2") ;;
        --timeout) whole_number "$1" "$2" && TIMEOUT=$2 ;;
        --out) OUT=$(absolute "$2") ;;
      esac
      shift 2
      ;;
    --bucket-sizes) NAMES="$NAMES $BUCKETS" SUFFIX=-buckets && shift ;;
    --list) printf '%s\n' $STRATEGIES $LOSSY $BUCKETS && exit ;;
    --help | -h) usage && exit ;;
    --) shift && EXTRA=("$@") && break ;;
    -*) fail "there is no option $1 (see --help)" ;;
    *)
      case " $(echo $STRATEGIES $LOSSY $BUCKETS) " in
        *" $1 "*) NAMES="$NAMES $1" && shift ;;
        *) fail "there is no strategy $1: there are $(echo $STRATEGIES $LOSSY $BUCKETS)" ;;
      esac
      ;;
  esac
done

case " ${EXTRA[*]} " in
  *" --device cpu "*) export CUDA_VISIBLE_DEVICES= ;;
esac
previous=
for word in "${EXTRA[@]}"; do # what is swept, and how long, depends on it
  [ "$previous" != --workload ] || WORKLOAD=$word
  [ "${word#--workload=}" = "$word" ] || WORKLOAD=${word#--workload=}
  previous=$word
done

# ---- the machine ----------------------------------------------------------------------------------

cd "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)" || exit 1
. ./setup.sh

TEMP=$(mktemp -d "${TMPDIR:-/tmp}/gptlite-sweep-XXXXXX") || exit 1
clean() {
  rm -rf "$TEMP" ${PART:+"$PART"} ${NVME:+"$NVME"}
}
trap clean EXIT

FACTS=(facts --text "$TEMP/machine.txt" --note "$INVOCATION")
[ -z "$NPROC" ] || FACTS+=(--nproc "$NPROC")
[ -z "$MODEL" ] || FACTS+=(--model "$MODEL")
FACTS+=(--workload "$WORKLOAD")
attended "$PYTHON" machine.py "${FACTS[@]}" > "$TEMP/facts" || exit $?
. "$TEMP/facts" # DEVICE GPUS CORES MODEL NPROC MACHINE NO_DEEPSPEED
if [ "$DEVICE" = cpu ]; then
  export DS_ACCELERATOR=cpu
  # deepspeed's launcher tells its workers to use GPU 0, 1, ...: without this they would find the hidden ones.
  [ -z "${CUDA_VISIBLE_DEVICES-unset}" ] && EXTRA=(--device cpu "${EXTRA[@]}")
elif [ "$NPROC" -gt "$GPUS" ]; then
  case " ${EXTRA[*]} " in
    *" --share-gpu "*) ;;
    *) fail "$NPROC processes on $GPUS GPU(s): give --nproc $GPUS, or share them (right memory, meaningless speed): -- --share-gpu" ;;
  esac
fi

case $DEVICE-$MODEL in
  cpu-nano | cpu-baby) most=16 micro=4 steps=60 limit=900 WINDOWS=192 ;;
  cpu-resnet18) most=16 micro=4 steps=20 limit=900 WINDOWS=192 ;;
  *-resnet18) most=256 micro=8 steps=100 limit=3600 WINDOWS= ;;
  cpu-*) most=4 micro=1 steps=3 limit=3600 WINDOWS=4 ;;
  *) most=256 micro=1 steps=20 limit=3600 WINDOWS= ;;
esac
MICRO=${MICRO:-$micro} STEPS=${STEPS:-$steps} TIMEOUT=${TIMEOUT:-$limit}
if [ -z "$BATCH" ]; then # the largest up to `most` that the processes can share
  BATCH=$((most / (MICRO * NPROC) * MICRO * NPROC))
  [ "$BATCH" -gt 0 ] || BATCH=$((MICRO * NPROC))
elif [ $((BATCH % (MICRO * NPROC))) -ne 0 ]; then
  fail "--batch-size $BATCH does not divide into micro-batches of $MICRO on $NPROC processes: give a multiple of $((MICRO * NPROC))"
fi

# The flags that all scripts get. No dropout, so that the losses can be compared; about 20 lines of log; without a
# GPU an evaluation on WINDOWS windows of the validation set in place of all.
flags() {
  local copies=${COPIES:-$PROCESSES}
  [ "$WORKLOAD" = gptlite ] && FLAGS=(--model "$MODEL") || FLAGS=(--workload "$WORKLOAD")
  FLAGS+=(--steps "$STEPS" --batch-size "$BATCH" --micro-batch-size "$MICRO"
    --log-every "$((STEPS < 20 ? 1 : STEPS / 20))")
  [ "$WORKLOAD" != gptlite ] || FLAGS+=(--dropout 0)
  [ -z "$WINDOWS" ] || FLAGS+=(--eval-steps "$(((WINDOWS + MICRO * copies - 1) / (MICRO * copies)))")
  [ -z "$DATA" ] || FLAGS+=(--data "$DATA")
  FLAGS+=("${EXTRA[@]}")
}

OUT=${OUT:-$PWD/results/$MACHINE$SUFFIX}
mkdir -p "$OUT/log" 2> /dev/null || fail "cannot write to $OUT"
if [ -n "$NAMES" ] && [ -f "$OUT/machine.txt" ]; then # the rows of earlier sweeps stay: so do their commands
  grep '^command: ' "$OUT/machine.txt" | grep -vxF "command: $INVOCATION" >> "$TEMP/machine.txt"
fi
cp "$TEMP/machine.txt" "$OUT/machine.txt" || fail "cannot write to $OUT"
NAMES=${NAMES:-$STRATEGIES}
OPS= PLANNING=1
for STRATEGY in $NAMES; do describe "$STRATEGY"; done
PLANNING=

# ---- the sweep ------------------------------------------------------------------------------------

set -- $NAMES
TOTAL=$# COUNT=0 FAILED=0
[ "$WORKLOAD" = gptlite ] && title="GPTlite $MODEL" || title=$MODEL
echo "$title on $(sed -n 's/^machine: //p' "$TEMP/machine.txt"): $NPROC processes, batch $BATCH, micro-batch $MICRO, $STEPS steps"
for STRATEGY in "$@"; do
  COUNT=$((COUNT + 1))
  LABEL=$(printf '[%2d/%d] %-22s ' $COUNT $TOTAL "$STRATEGY")
  describe "$STRATEGY"
  LOG=$OUT/log/$STRATEGY.log PART=$OUT/log/.$STRATEGY.$$ # it takes the old one's place when it is complete
  {
    echo "sweep: model=$MODEL, processes=$PROCESSES, device=$DEVICE, batch=$BATCH, micro_batch=$MICRO, steps=$STEPS"
    [ -n "$REASON" ] || {
      flags
      COMMAND+=("${FLAGS[@]}")
      shown=$SHOWN
      show "${FLAGS[@]}"
      echo "command: $shown $SHOWN"
    }
    echo "date: $(date '+%Y-%m-%d %H:%M')"
  } > "$PART"
  if [ -n "$REASON" ]; then
    echo "status: status=skipped, seconds=0, reason=$REASON" >> "$PART"
    echo "${LABEL}skipped       $REASON"
  else
    # Two processes with a thread per core each would fight for the cores.
    threads=$((CORES / PROCESSES > 0 ? CORES / PROCESSES : 1))
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} attended "$PYTHON" supervise.py --log "$PART" \
      --name "$LOG" --timeout "$TIMEOUT" --label "$LABEL" -- "${COMMAND[@]}"
    code=$?
    [ $code -lt 128 ] || exit $code # interrupted by a signal of its own
    [ $code -eq 0 ] || FAILED=1
    [ -z "$NVME" ] || rm -rf "$NVME"
    NVME=
  fi
  mv "$PART" "$LOG"
  PART=
  "$PYTHON" collect.py --quiet "$OUT" || FAILED=1 # after each, so that the tables are there if it is interrupted
done

echo
"$PYTHON" collect.py "$OUT" || FAILED=1
case $NAMES in
  *_bucket_*) echo && "$PYTHON" buckets.py "$OUT" || FAILED=1 ;;
esac
echo
attended "$PYTHON" plot.py "$OUT" || FAILED=1
exit $FAILED
