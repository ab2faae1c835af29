# shellcheck shell=bash disable=SC2034
# What the scripts for two nodes have in common. It is sourced, and runs with the bash 3.2 of macOS:
#
#     #!/usr/bin/env bash
#     # usage: bench.sh [options]          the comment at the top of the script is what --help prints,
#     # ...                                 and the common options follow it
#     set -euo pipefail
#     . "$(dirname "${BASH_SOURCE[0]}")/two_nodes.sh"
#     own_option() { ... }                  only where the script has options of its own, see parse_options
#     parse_options "$@"
#     write_hostfile                        $DIRECTORY/hosts.json, in a directory that is gone when the script ends
#     mlxdist_here launch "${ON_NODES[@]}" -- "$(remote_python)" "$(remote_path scripts/program.py)"
#
# Set afterwards: NODE0 NODE1 NODE0_IP NODE1_IP REMOTE_DIR SSH NODE_PYTHON, ROOT (this project), DIRECTORY and HOSTFILE
# (after write_hostfile), ON_HOSTS (what every mlxdist command takes to find the nodes) and ON_NODES (the same for
# `mlxdist launch`, with the directory that ranks run in).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Not MLXDIST_*: every rank would refuse variables of that name that it does not know.
NODE0=${RMLX_NODE0-}
NODE1=${RMLX_NODE1-}
NODE0_IP=${RMLX_NODE0_IP-}
NODE1_IP=${RMLX_NODE1_IP-}
REMOTE_DIR=${RMLX_REMOTE_DIR-}
SSH=${RMLX_SSH-ssh}
NODE_PYTHON=${RMLX_PYTHON-}
DIRECTORY=

COMMON_OPTIONS='
Options for the nodes, and the variables that stand in for them:
  --node0 NAME       what ssh connects to for rank 0; localhost is this machine   RMLX_NODE0
  --node1 NAME       the same for rank 1; may be the same host                    RMLX_NODE1
  --node0-ip IP      address that the other node reaches it at, of the cable      RMLX_NODE0_IP
                     if there is one; left out: the one that ssh reaches
  --node1-ip IP                                                                   RMLX_NODE1_IP
  --remote-dir PATH  this project on the nodes; left out: where it is here        RMLX_REMOTE_DIR
  --python PATH      Python on the nodes that has mlxdist; left out: .venv in     RMLX_PYTHON
                     --remote-dir, else the one used here
  --ssh COMMAND      how to reach nodes, as "ssh -F my_config"                    RMLX_SSH
  --help'

# show_help: the comment at the top of the script, then the common options.
show_help() {
    sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$0"
    printf '%s\n' "$COMMON_OPTIONS"
}

# usage_error TEXT: as click does, exit status 2.
usage_error() {
    printf '%s: %s; see %s --help\n' "${0##*/}" "$1" "$0" >&2
    exit 2
}

# parse_options "$@": sets the variables above. An option that is not known here goes to the script's function
# own_option NAME VALUE, if there is one, which sets TAKEN to the number of words it used: 1, 2, or 0 if it does not
# know it either.
parse_options() {
    while [ $# -gt 0 ]; do
        TAKEN=2
        case $1 in
            --node0 | --node1 | --node0-ip | --node1-ip | --remote-dir | --python | --ssh)
                [ $# -ge 2 ] || usage_error "$1 needs a value" ;;
        esac
        case $1 in
            --node0) NODE0=$2 ;;
            --node1) NODE1=$2 ;;
            --node0-ip) NODE0_IP=$2 ;;
            --node1-ip) NODE1_IP=$2 ;;
            --remote-dir) REMOTE_DIR=$2 ;;
            --python) NODE_PYTHON=$2 ;;
            --ssh) SSH=$2 ;;
            --help | -h) show_help; exit 0 ;;
            *)
                TAKEN=0
                if [ "$(type -t own_option || true)" = function ]; then own_option "$1" "${2-}"; fi
                [ "$TAKEN" -gt 0 ] || usage_error "there is no option $1"
                [ "$TAKEN" -le $# ] || usage_error "$1 needs a value" ;;
        esac
        shift "$TAKEN"
    done
    [ -n "$NODE0" ] || usage_error "--node0 is missing (or RMLX_NODE0)"
    [ -n "$NODE1" ] || usage_error "--node1 is missing (or RMLX_NODE1)"
    NODE0=$(one_name "$NODE0")
    NODE1=$(one_name "$NODE1")
}

# one_name NAME: this machine is one host, whatever it is called; its two ranks then share it.
one_name() {
    case $1 in
        localhost | 127.0.0.1 | ::1) echo localhost ;;
        *) echo "$1" ;;
    esac
}

# local_python: runs the commands of mlxdist on this machine.
local_python() {
    if [ -x "$ROOT/.venv/bin/python" ]; then echo "$ROOT/.venv/bin/python"; else command -v python3; fi
}

# remote_python: runs the ranks on the nodes.
remote_python() {
    if [ -n "$NODE_PYTHON" ]; then
        echo "$NODE_PYTHON"
    elif [ -n "$REMOTE_DIR" ]; then
        echo "$REMOTE_DIR/.venv/bin/python"
    else
        local_python
    fi
}

# remote_path PATH: a file of this project, where it is on the nodes.
remote_path() {
    echo "${REMOTE_DIR:-$ROOT}/$1"
}

mlxdist_here() {
    "$(local_python)" -m mlxdist "$@"
}

# write_hostfile: the two nodes, in a temporary directory. Exits where mlxdist finds something wrong with them.
write_hostfile() {
    DIRECTORY=$(mktemp -d "${TMPDIR:-/tmp}/mlxdist-two-nodes.XXXXXX")
    trap remove_directory EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    HOSTFILE=$DIRECTORY/hosts.json
    "$(local_python)" -c '
import json, sys
names, ips = sys.argv[1:3], sys.argv[3:]
json.dump([{"ssh": name, "ips": [ip] if ip else []} for name, ip in zip(names, ips)], sys.stdout)
' "$NODE0" "$NODE1" "$NODE0_IP" "$NODE1_IP" >"$HOSTFILE"
    mlxdist_here hostfile check "$HOSTFILE" >/dev/null || exit 2
    ON_HOSTS=(--hostfile "$HOSTFILE" --ssh "$SSH" --python "$(remote_python)")
    ON_NODES=("${ON_HOSTS[@]}" --cwd "${REMOTE_DIR:-$ROOT}")
}

# run_suite NAME: `mlxdist bench suite` on the nodes, with the options in the array SUITE. TARGET, a new directory in
# $RESULTS, gets suite.json, table.txt and, where there is matplotlib, report.html.
run_suite() {
    TARGET=$RESULTS/$1-$(date +%Y%m%d-%H%M%S)
    mkdir -p "$TARGET"
    if "$(local_python)" -c 'import matplotlib' 2>/dev/null; then
        SUITE+=(--html "$TARGET/report.html")
    else
        echo "no report.html: this needs matplotlib, pip install 'mlxdist[bench]'" >&2
    fi
    # bash 3.2: an empty array is an unset variable
    mlxdist_here bench suite "${ON_HOSTS[@]}" --output "$TARGET/suite.json" ${SUITE[@]+"${SUITE[@]}"} |
        tee "$TARGET/table.txt"
}

remove_directory() {
    if [ -n "$DIRECTORY" ]; then rm -rf "$DIRECTORY"; fi
}
