# shellcheck shell=bash
# Carries out commands that come as lines "number seconds command", the command in base64, through the port $1. Output
# goes to /exchange/NUMBER, "number status" back through the port. The other side hanging up is the end.
exec 3<>"$1"
echo ready >&3
while read -r number seconds command <&3; do
  timeout --kill-after=20 "$seconds" bash -c "$(base64 -d <<<"$command")" </dev/null >"/exchange/$number" 2>&1
  status=$?
  echo "$number $status" >&3
done
