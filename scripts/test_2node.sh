#!/usr/bin/env bash
# See two_nodes.py, and --help. bench_2node.sh and compare_2node.sh are links to this: the name is the command.
directory=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$directory/../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$directory/two_nodes.py" "${0##*/}" "$@"
