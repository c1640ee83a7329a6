#!/usr/bin/env bash
# Plants known mistakes, one at a time, and shows that the tests named with each catch it. One that survives is a missing test.
#
#   tests/planted_bugs.sh            all of tests/planted_bugs/*.patch
#   tests/planted_bugs.sh NAME...    only these
#
# Each patch says what it gets wrong, and in "Tests:" which integration tests have to notice. Works on a copy of the last commit,
# and builds there.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
copy=$(mktemp -d)
trap 'git worktree remove --force "$copy" >/dev/null; exit' EXIT INT TERM
git worktree add --quiet --detach "$copy" HEAD
export CARGO_TARGET_DIR="$root/target/planted_bugs"
names=("$@")
if [ $# -eq 0 ]; then
    for patch in tests/planted_bugs/*.patch; do names+=("$(basename "$patch" .patch)"); done
fi
cd "$copy"
survived=0
for name in "${names[@]}"; do
    patch=$root/tests/planted_bugs/$name.patch
    read -ra tests <<<"$(sed -n 's/^Tests: //p' "$patch")"
    git checkout --quiet .
    if ! git apply "$patch"; then
        printf '%-34s does not apply\n' "$name"
        survived=1
    elif ! cargo test --quiet --no-run --test integration 2>"$CARGO_TARGET_DIR.log"; then
        printf '%-34s does not build; see %s\n' "$name" "$CARGO_TARGET_DIR.log"
        survived=1
    elif out=$(timeout 300 cargo test --quiet --test integration -- "${tests[@]}" 2>&1); then
        printf '%-34s SURVIVED\n' "$name"
        survived=1
    else
        # The first of the tests that failed, or the lack of an answer.
        caught=$(sed -n 's/^    \([a-z_]*::[a-z_0-9]*\)$/\1/p' <<<"$out" | sort -u | head -1)
        printf '%-34s caught by %s\n' "$name" "${caught:-a timeout}"
    fi
done
exit "$survived"
