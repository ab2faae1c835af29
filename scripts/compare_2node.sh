#!/usr/bin/env bash
# usage: compare_2node.sh --node0 NAME --node1 NAME [options]
#
# mlxdist compared with MLX's own backends between two nodes, one rank on each, in the same run: the table has a column for
# each backend and how many times as long as mlxdist it takes. Writes what bench_2node.sh writes, and with --baseline a
# comparison with an earlier run.
#
# The exit status is 0 if every result was right, 1 if not, or if a case became slower by more than --max-slowdown, 2 if
# the options are wrong.
#
#     scripts/compare_2node.sh --node0 mac0 --node1 mac1 --ep-only
#
# Options:
#   --ep-only          expert parallelism alone: transport and pipeline
#   --tp-only          tensor parallelism alone: a decoder layer, decode and prefill
#   --decode-only      of that, decode alone
#   --mlx-only         MLX's backends alone
#   --mlxdist-only     mlxdist alone
#   --quick            two sizes, few iterations
#   --baseline FILE    suite.json of an earlier run, to compare with
#   --max-slowdown N   with --baseline: the exit status is 1 if a case takes more than N times as long as there
#   --results PATH     directory in which the new one is made; default: this one
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/two_nodes.sh"

RESULTS=.
BASELINE=
ONLY=()
BACKENDS=()
SUITE=()
COMPARE=()

own_option() {
    TAKEN=1
    case $1 in
        --ep-only) ONLY+=("ep_transport,ep_pipeline") ;;
        --tp-only) ONLY+=("tp_decode,tp_prefill") ;;
        --decode-only) ONLY+=("tp_decode") ;;
        --mlx-only) BACKENDS+=("ring,mpi,jaccl") ;;
        --mlxdist-only) BACKENDS+=(mlxdist) ;;
        --quick) SUITE+=(--quick) ;;
        --baseline) BASELINE=$2; TAKEN=2 ;;
        --max-slowdown) COMPARE=(--max-slowdown "$2"); TAKEN=2 ;;
        --results) RESULTS=$2; TAKEN=2 ;;
        *) TAKEN=0 ;;
    esac
}

parse_options "$@"
[ ${#ONLY[@]} -le 1 ] || usage_error "--ep-only, --tp-only and --decode-only exclude each other"
[ ${#BACKENDS[@]} -le 1 ] || usage_error "--mlx-only and --mlxdist-only exclude each other"
[ ${#COMPARE[@]} -eq 0 ] || [ -n "$BASELINE" ] || usage_error "--max-slowdown needs --baseline, the earlier run"
[ -z "$BASELINE" ] || [ -f "$BASELINE" ] || usage_error "--baseline: there is no file $BASELINE"
[ ${#ONLY[@]} -eq 0 ] || SUITE+=(--only "${ONLY[0]}")
[ ${#BACKENDS[@]} -eq 0 ] || SUITE+=(--backends "${BACKENDS[0]}")
write_hostfile
run_suite compare-2node
if [ -n "$BASELINE" ]; then
    mlxdist_here bench compare "$BASELINE" "$TARGET/suite.json" ${COMPARE[@]+"${COMPARE[@]}"} | tee "$TARGET/compare.txt"
fi
echo "Written: $TARGET"
