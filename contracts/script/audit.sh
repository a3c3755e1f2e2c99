#!/bin/bash
# Static analysis (slither) and proofs for every input (halmos) of contracts/src.
#
#   contracts/script/audit.sh            both
#   contracts/script/audit.sh halmos     contracts/test/symbolic only
#   contracts/script/audit.sh slither    contracts/src only
#
# Both want an environment of their own (contracts/.envs/audit, made here once) and a copy of the tree:
# slither cleans the build of the tree it works in. Findings that stand are explained in docs/security.md.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
env="$root/contracts/.envs/audit"
what=${1:-both}

if [ ! -x "$env/bin/slither" ] || [ ! -x "$env/bin/halmos" ]; then
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check halmos==0.3.3 slither-analyzer==0.11.3
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/contracts/test" "$copy/bin"
cp -R "$root/foundry.toml" "$root/tools" "$copy/"
cp -R "$root/contracts/src" "$copy/contracts/src"
ln -s "$root/node_modules" "$copy/node_modules"
# Both tools call `forge` by its name.
printf '#!/bin/sh\nexec "%s/tools/forge" "$@"\n' "$copy" > "$copy/bin/forge"
chmod +x "$copy/bin/forge"
export PATH="$copy/bin:$env/bin:$PATH"
export FOUNDRY_DENY=never
cd "$copy"

if [ "$what" != halmos ]; then
  # Its exit status tells that there are findings; which of them are new is decided below.
  slither . --config-file "$root/contracts/slither.json" --json slither.found.json > slither.log 2>&1 || true
  "$env/bin/python" "$root/contracts/script/findings.py" slither.found.json
fi
if [ "$what" != slither ]; then
  cp -R "$root/contracts/test/symbolic" contracts/test/symbolic
  for contract in StakeVaultSymbolic RecordsSymbolic TreesSymbolic; do
    halmos --contract "$contract" --loop 40 --solver-timeout-assertion 300s
  done
fi
