"""Every way to size the KV cache, side by side: `vmm-kv bench startup`, for those who look for it here."""

from __future__ import annotations

import sys

from vmm_kv.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "startup", *sys.argv[1:]]))
