"""The script a rented container runs: fetch one checked archive, start `spotwarp run`, destroy itself when left alone.

It is the same on every provider and on `local`. It holds no secret (P-15): the archive's presigned URL, the store's
credentials and the key with which a container may destroy itself are environment variables, and reach curl through
its standard input, never through an argument list. It installs nothing into the image: all it writes lies in one
directory. What is unpacked stays: the entry is the archive's last member, and a zombie that is resumed after its URL
has ended starts from it. A dead-man loop counts how long nobody touched the file `alive` (the node's agent does, while
the job lives or a controller does), and ends the rental after that.

    argv of the archive's entry:   python node.py run --job JOB (the rest is in the job's spec, in the store)
    environment it reads:          SPOTWARP_BUNDLE_URL, SPOTWARP_HOME, and what `SelfDestruct.url` and `key` name
    environment it sets:           SPOTWARP_INTENT, SPOTWARP_ALIVE
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from provisioner.core.errors import BadWish

SCRIPT_BYTES_MAX: Final = 4000
"""Vast takes 4,096 for script and arguments together (providers.md 1.3)."""
PACKED_VARIABLE: Final = "SPOTWARP_BOOT"
ENVIRONMENT_BYTES_MAX: Final = 32_768
"""Vast's total for the environment (providers.md 1.3)."""
EXIT_FENCED: Final = 12
"""`spotwarp run`'s exit code when another node took the workspace over (docs/OPERATIONS.md)."""
FETCH_TRIES: Final = 5
_URL: Final = re.compile(r"https?://[A-Za-z0-9$_.:/-]+")
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_IDENT: Final = re.compile(r"[0-9a-f]{8}-[0-9]{1,6}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SelfDestruct:
    """The call by which a container ends its own rental; its key is the provider's, for this instance only."""

    url: str
    """With the container's own variables in it: `https://…/instances/$CONTAINER_ID/`."""
    key: str
    """Name of the variable that holds the key."""
    method: str = "DELETE"

    def __post_init__(self) -> None:
        assert _URL.fullmatch(self.url), f"{self.url!r} has characters that the shell would read"
        assert _VARIABLE.fullmatch(self.key), f"{self.key!r} is not the name of a variable"
        assert self.method in ("DELETE", "POST"), self.method


VAST: Final = SelfDestruct("https://console.vast.ai/api/v0/instances/$CONTAINER_ID/", "CONTAINER_API_KEY")
RUNPOD: Final = SelfDestruct("https://api.runpod.io/v2/pods/$RUNPOD_POD_ID", "RUNPOD_API_KEY")
"""That a pod's own key may end its pod is inferred (providers.md 2.4): probed at the first launch."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Everything the script says."""

    ident: str
    """The intent's: what the node signs its reports with."""
    run: tuple[str, ...]
    """Arguments of the archive's entry (`provisioner.node`): `run --job JOB`; not secret."""
    bundle_sha256: str
    destroy: SelfDestruct | None
    boot_s: int = 900
    """Without any sign of life since the start it destroys itself after this."""
    silent_s: int = 600
    """Without one since the last it destroys itself after this."""
    check_s: int = 15
    image_start: tuple[str, ...] = ()
    """The image's own start script, kept running beside."""


_TEMPLATE: Final = """\
set -eu
umask 077
W=${{SPOTWARP_HOME:-${{TMPDIR:-/tmp}}/spotwarp-{ident}}}
mkdir -p "$W/bundle"
cd "$W"
say() {{ echo "spotwarp {ident}: $*" >&2; }}
have() {{ command -v "$1" >/dev/null 2>&1; }}
destroy() {{
say "destroys itself: $1"
{destroy}
}}
(
n=0
limit={boot_s}
while sleep {check_s}; do
if [ -e alive ]; then rm -f alive; n=0; limit={silent_s}; else n=$((n + {check_s})); fi
if [ "$n" -ge "$limit" ]; then destroy "nobody lives for $n s" || say "could not"; fi
done
) &
D=$!
{image_start}
fetch() {{
if have curl && printf 'url = "%s"\\n' "$SPOTWARP_BUNDLE_URL" | curl -fsSL -m 300 -K - -o bundle.tgz; then return; fi
if have wget && printf '%s\\n' "$SPOTWARP_BUNDLE_URL" | wget -q -T 60 -i - -O bundle.tgz; then return; fi
python3 -c 'import os, urllib.request as u; u.urlretrieve(os.environ["SPOTWARP_BUNDLE_URL"], "bundle.tgz")'
}}
check() {{
if have sha256sum; then echo "{sha256}  bundle.tgz" | sha256sum -c - >/dev/null
else python3 -c 'import hashlib, sys
sys.exit(hashlib.sha256(open("bundle.tgz", "rb").read()).hexdigest() != "{sha256}")'; fi
}}
i=0
until [ -e bundle/node.py ] || {{ fetch && check && tar -xzf bundle.tgz -C bundle; }}; do
i=$((i + 1))
say "the archive did not arrive whole, try $i"
if [ "$i" -ge {tries} ]; then destroy "no archive" || wait "$D"; exit 1; fi
sleep {check_s}
done
unset SPOTWARP_BUNDLE_URL
rm -f bundle.tgz
P=
for p in python3.13 python3.12 python3.11 python3 python; do
if have "$p" && "$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then P=$p; break; fi
done
if [ -z "$P" ]; then
export UV_PYTHON_INSTALL_DIR="$W/python"
if bundle/uv python install -q 3.12; then P=$(bundle/uv python find --managed-python 3.12) || P=; fi
fi
if [ -z "$P" ]; then destroy "no Python of 3.11 to 3.13" || wait "$D"; exit 1; fi
export SPOTWARP_INTENT={ident} SPOTWARP_ALIVE="$W/alive"
"$P" "$W/bundle/node.py" {run} &
C=$!
trap 'kill -TERM "$C" 2>/dev/null || :' TERM INT
R=0
while :; do
R=0
wait "$C" || R=$?
kill -0 "$C" 2>/dev/null || break
done
say "run ended with $R"
if [ "$R" -eq {fenced} ]; then destroy "fenced" || :; fi
{at_end}
"""

_DESTROY: Final = """\
if have curl; then
printf 'url = "%s"\\nheader = "Authorization: Bearer %s"\\n' "{url}" "${{{key}:-}}" |
curl -fsS -m 30 -X {method} -K - >&2
else
U="{url}" python3 -c 'import os, urllib.request as u
h = {{"Authorization": "Bearer " + os.environ["{key}"]}}
u.urlopen(u.Request(os.environ["U"], method="{method}", headers=h), timeout=30)'
fi"""
_DIES: Final = "kill -KILL 0"
"""Where the death of the process group ends the rental, or where nothing else can."""


def render(boot: Bootstrap) -> str:
    """Return the script for `/bin/sh -c`, at most SCRIPT_BYTES_MAX long unless the user's command is longer.

    Nothing but `run` and `image_start` comes from the user, and both are quoted word by word.
    """
    assert _IDENT.fullmatch(boot.ident), boot.ident
    assert _SHA256.fullmatch(boot.bundle_sha256), boot.bundle_sha256
    assert min(boot.boot_s, boot.silent_s, boot.check_s) > 0
    assert boot.run, "nothing to run"
    if any("\0" in word for word in (*boot.run, *boot.image_start)):
        raise BadWish("the command has a NUL byte in it: no shell can pass it on")
    image_start = f"{{ {shlex.join(boot.image_start)}; }} >image-start.log 2>&1 &" if boot.image_start else ":"
    kill_self = boot.destroy is None
    return _TEMPLATE.format(
        ident=boot.ident,
        destroy=_DIES if boot.destroy is None else _destroy(boot.destroy),
        boot_s=boot.boot_s,
        silent_s=boot.silent_s,
        check_s=boot.check_s,
        image_start=image_start,
        sha256=boot.bundle_sha256,
        tries=FETCH_TRIES,
        run=shlex.join(boot.run),
        fenced=EXIT_FENCED,
        # Without a call to end the rental the process is the rental; with one, it waits so that logs can be read, and
        # the controller or the dead-man loop ends it.
        at_end='kill "$D" 2>/dev/null || :\nexit "$R"' if kill_self else 'wait "$D"\nexit "$R"',
    )


def _destroy(call: SelfDestruct) -> str:
    return _DESTROY.format(url=call.url, key=call.key, method=call.method)


def packed(script: str, bytes_max: int = SCRIPT_BYTES_MAX) -> tuple[str, Mapping[str, str]]:
    """Return what to start and the environment it needs: the script itself, or, when it is too long, a stub.

    Raises BadWish when not even the packed script fits into an environment.
    """
    if len(script.encode()) <= bytes_max:
        return script, {}
    body = base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()
    if len(body) > ENVIRONMENT_BYTES_MAX // 2:
        raise BadWish(
            f"the command makes a start script of {len(body)} bytes packed, at most {ENVIRONMENT_BYTES_MAX // 2} "
            "can be sent: put it into a script in the workspace and name that"
        )
    stub = f'B=$(printf %s "${PACKED_VARIABLE}" | base64 -d | gzip -dc) && unset {PACKED_VARIABLE} && eval "$B"'
    return stub, {PACKED_VARIABLE: body}
