#!/usr/bin/env bash
# usage: test_2node.sh --node0 NAME --node1 NAME [options]
#
# Checks that two nodes compute together what one process computes, in five steps, each a job of `mlxdist launch` with
# one rank on each node:
#   sendrecv     messages of different sizes both ways at once, 1 KB against 2 KB and odd ones
#   registration memory that is registered once is not registered again (memory regions are kept)
#   collectives  every collective, float16 and float32, against NumPy
#   experts      dispatch, experts and combine of a mixture of experts against one process
#   linears      column- and row-parallel linear layers against one process
#
# The exit status is 0 if all steps have succeeded, 1 if not, 2 if the options are wrong. What a failed step has printed
# is shown.
#
#     scripts/test_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2
#
# Options:
#   --only STEP        this step alone
#   --timeout SECONDS  for each step (120)
set -euo pipefail
# shellcheck source=scripts/two_nodes.sh
. "$(dirname "${BASH_SOURCE[0]}")/two_nodes.sh"

STEPS=(sendrecv registration collectives experts linears)
ONLY=
LIMIT=120

own_option() {
    case $1 in
        --only) ONLY=$2; TAKEN=2 ;;
        --timeout) LIMIT=$2; TAKEN=2 ;;
    esac
}

parse_options "$@"
if [ -n "$ONLY" ]; then
    case " ${STEPS[*]} " in
        *" $ONLY "*) STEPS=("$ONLY") ;;
        *) usage_error "there is no step $ONLY" ;;
    esac
fi
write_hostfile

# run_step STEP: RESULT is what the table says of it.
run_step() {
    local output="$DIRECTORY/$1.txt" status=0
    mlxdist_here launch "${ON_NODES[@]}" --timeout "$LIMIT" -- \
        "$(remote_python)" "$(remote_path "scripts/two_nodes/$1.py")" >"$output" 2>&1 </dev/null || status=$?
    case $status in
        0) RESULT=ok ;;
        124) RESULT="not done within $LIMIT s" ;;
        *) RESULT="failed with status $status" ;;
    esac
    if [ "$status" -ne 0 ]; then
        echo "--- $1 $RESULT; it printed:"
        cat "$output"
        echo "---"
    fi
}

table=
failed=0
for step in "${STEPS[@]}"; do
    begin=$SECONDS
    run_step "$step"
    [ "$RESULT" = ok ] || failed=1
    table="$table$(printf '%-13s %-25s %7d' "$step" "$RESULT" "$((SECONDS - begin))")
"
done
printf '%-13s %-25s %7s\n%s' step result seconds "$table"
exit "$failed"
