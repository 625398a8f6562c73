"""SpotWarp with streaming off: the same program, but nothing goes up before its interval ends. Not a way to use it.

There is no such setting, because nobody wants it; the bench needs it to say what streaming costs.
"""

import trio

from spotwarp_fs.cli.main import main
from spotwarp_fs.engine.early import EarlyUpload


async def _send_nothing(_: EarlyUpload) -> None:
    await trio.sleep_forever()


if __name__ == "__main__":
    EarlyUpload.run = _send_nothing  # type: ignore[method-assign]
    main()
