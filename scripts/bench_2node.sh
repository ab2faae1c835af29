#!/usr/bin/env bash
# usage: bench_2node.sh --node0 NAME --node1 NAME [options]
#
# Runs `mlxdist bench suite` between two nodes, one rank on each: every operation, expert parallelism and a
# tensor-parallel layer, by mlxdist and by those of MLX's backends that work there. Writes suite.json, table.txt and,
# where there is matplotlib, report.html into a new directory, named by the time.
#
# The exit status is 0 if every result was right, 1 if not, 2 if the options are wrong.
#
#     scripts/bench_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2
#     mlxdist bench compare bench-2node-*/suite.json            two of them
#
# Options:
#   --quick            two sizes, few iterations
#   --only A,B         these operations, see `mlxdist bench suite --help`
#   --backends A,B     these of mlxdist, ring, mpi, jaccl
#   --results PATH     directory in which the new one is made; default: this one
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/two_nodes.sh"

RESULTS=.
SUITE=()

own_option() {
    case $1 in
        --quick) SUITE+=(--quick); TAKEN=1 ;;
        --only | --backends) SUITE+=("$1" "$2"); TAKEN=2 ;;
        --results) RESULTS=$2; TAKEN=2 ;;
    esac
}

parse_options "$@"
write_hostfile
run_suite bench-2node
echo "Written: $TARGET"
