"""`fagen cache`: the folder of compiled kernels."""

from __future__ import annotations

from fagen.build.cache import cache_folder, clear_cache
from fagen.cli.options import examples, new_app

app = new_app(help="The folder of compiled kernels.")


@app.command(epilog=examples("fagen cache path"))
def path() -> None:
    """Print the folder of compiled kernels (FAGEN_CACHE moves it)."""
    print(cache_folder())


@app.command(epilog=examples("fagen cache clear"))
def clear() -> None:
    """Remove every compiled kernel; the next call compiles again."""
    print(f"freed {clear_cache() / 1e6:.1f} MB")
