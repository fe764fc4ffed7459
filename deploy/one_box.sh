#!/usr/bin/env bash
# A service and its trainer ranks on one machine:
#
#   deploy/one_box.sh PLAN TRAIN.py [arguments of TRAIN.py]
#
# TRAIN.py gets the service's URL as its first argument, and finds the token in the environment. What may be set:
# CP, LAYOUT, RANKS (of torchrun), BUILDERS, WAIT (seconds until the service must be up).
set -euo pipefail

if (($# < 2)); then
    echo "usage: one_box.sh PLAN TRAIN.py [arguments]" >&2
    exit 2
fi
plan=$1 train=$2
shift 2
: "${CP:=2}"
: "${LAYOUT:=whole_document}"
: "${RANKS:=2}"
: "${BUILDERS:=1}"
: "${WAIT:=180}"

# Files that only this user reads: the token is all that a rank needs.
umask 077
run=$(mktemp -d "${TMPDIR:-/tmp}/ringfeed-one-box.XXXXXX")
serve='' ranks=''

clean_up() {
    trap '' INT TERM
    for process in $ranks $serve; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$run"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$run/token"
export RINGFEED_TOKEN_FILE="$run/token"
: >"$run/ready"

ringfeed serve "$plan" --cp "$CP" --layout "$LAYOUT" --builders "$BUILDERS" --token-file "$run/token" --json >"$run/ready" &
serve=$!

url=''
for ((second = 0; second < WAIT; second++)); do
    url=$(sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' "$run/ready")
    [[ -n $url ]] && break
    if ! kill -0 "$serve" 2>/dev/null; then
        code=0
        wait "$serve" || code=$?
        serve=''
        echo "one_box.sh: the service ended before it was up (exit code $code)" >&2
        exit $((code ? code : 1))
    fi
    sleep 1
done
if [[ -z $url ]]; then
    echo "one_box.sh: the service was not up within $WAIT s; set WAIT" >&2
    exit 1
fi

# In the background, so that a signal to this script is heard at once.
torchrun --standalone --nproc-per-node "$RANKS" "$train" "$url" "$@" &
ranks=$!
wait "$ranks"
