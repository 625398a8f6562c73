# Sourced by scripts/test and scripts/check: runs named stages, prints one verdict line each, and remembers failures.
# A stage that fails shows its output and never hides the stages after it; verdicts_exit ends with non-zero if any failed.

VERDICTS=()
FAILED=0

verdict() { # NAME CODE SECONDS
  local word=ok
  if [ "$2" != 0 ]; then word=FAIL FAILED=1; fi
  VERDICTS+=("$(printf '%-5s %-14s %4d s' "$word" "$1" "$3")")
}

stage() { # NAME COMMAND...
  local name=$1 began=$SECONDS output code
  shift
  output=$("$@" 2>&1); code=$?
  verdict "$name" $code $((SECONDS - began))
  if [ $code != 0 ]; then printf '%s\n' "$output"; fi
  printf '%s\n' "${VERDICTS[-1]}"
}

static_stages() {
  local bin=$VENV/bin
  stage "ruff format" "$bin/ruff" format --check .
  stage "ruff check" "$bin/ruff" check .
  stage mypy "$bin/mypy"
  stage lint-imports "$bin/lint-imports" --no-cache
}

# Streams pytest's own output, so that a long run can be watched; PYTEST_LOG keeps it for the closing line.
pytest_stage() { # NAME ARGUMENTS...
  local name=$1 began=$SECONDS
  shift
  PYTEST_LOG=$(mktemp)
  "$VENV/bin/python" -m pytest "$@" 2>&1 | tee "$PYTEST_LOG"
  verdict "$name" "${PIPESTATUS[0]}" $((SECONDS - began))
}

# Repeats every verdict, then pytest's closing line as the last one.
verdicts_exit() {
  printf '\n'
  printf '%s\n' "${VERDICTS[@]}" "$@"
  [ -z "${PYTEST_LOG:-}" ] || { tail -n 1 "$PYTEST_LOG"; rm -f "$PYTEST_LOG"; }
  exit "$FAILED"
}
