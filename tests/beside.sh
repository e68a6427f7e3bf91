#!/usr/bin/env bash
# tests/beside.sh SERVICES COMPUTING: two commands of tests at once, each a line of shell.
#
# What starts services mostly waits for them, and what only computes needs no time of day. So the one has the cores for
# itself whenever it wants them, and the other takes what that leaves: each of its processes is as nice as can be, and so
# is, where Linux gives every session a share of its own, its session. What it says comes after what the services say;
# then, once more, the closing line of each run of tests. Fails where one of them does, when both have ended.
set -euo pipefail
said="$(mktemp -d)"
setsid nice -n 19 bash -c '{ echo 19 > /proc/self/autogroup; } 2>/dev/null; eval "$1"' _ "$2" > "$said/computing" 2>&1 &
computing=$!
trap 'kill -- "-$computing" 2>/dev/null || true; rm -rf "$said"' EXIT

status=0
bash -c "$1" 2>&1 | tee "$said/services" || status=1
wait "$computing" || status=1
cat "$said/computing"
grep -hE '^(RERUN|FAILED|ERROR) |^([0-9]+ [a-z]+|no tests ran).* in [0-9.]+s( |$)|: not this CPU|^left out' \
  "$said/services" "$said/computing" || true
exit "$status"
