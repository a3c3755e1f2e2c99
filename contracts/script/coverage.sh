#!/bin/bash
# Coverage of contracts/src by the forge tests; fails below 95 % of lines or 90 % of branches.
#
#   contracts/script/coverage.sh              prints the table
#
# Works in a copy of the tree: coverage is built without the optimizer, and must not replace the build.
# Gas.t.sol and the address of the factory are left out: both are of optimised code.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/tests/conformance"
cp -R "$root/foundry.toml" "$root/tools" "$root/contracts" "$copy/"
cp -R "$root/tests/conformance/vectors" "$copy/tests/conformance/vectors"
rm -rf "$copy/contracts/.envs"
ln -s "$root/node_modules" "$copy/node_modules"
cd "$copy"
FOUNDRY_DENY=never FOUNDRY_FUZZ_RUNS="${FUZZ_RUNS:-64}" FOUNDRY_INVARIANT_RUNS="${INVARIANT_RUNS:-4}" \
  tools/forge coverage --no-match-contract GasTest --no-match-test test_deployment --no-match-coverage '(node_modules|contracts/(test|script))' \
  --report summary --report lcov
awk -F: '
  /^SF/ { source = $2 ~ "^contracts/src/" } !source { next }
  /^LF/ { lines += $2 } /^LH/ { hit += $2 } /^BRF/ { branches += $2 } /^BRH/ { taken += $2 }
  END {
    printf "lines %.1f %%, branches %.1f %%\n", 100 * hit / lines, 100 * taken / branches
    exit hit < 0.95 * lines || taken < 0.90 * branches
  }' lcov.info
