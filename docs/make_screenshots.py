"""Makes the pictures in `docs/img`: `nox -s screenshots`. Needs Chromium; the page alone needs no browser."""

import argparse
import pathlib
import shutil
import subprocess
import tempfile

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from PIL import Image, ImageChops

import eqshard


IMAGES = pathlib.Path(__file__).parent / "img"
LEAF = ".layers[0..79].mlp.gate"
WIDTH, ROOM = 1480, 1900
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=3000"
).split()


class Attention(eqx.Module):
    wq: jax.ShapeDtypeStruct
    wk: jax.ShapeDtypeStruct
    wv: jax.ShapeDtypeStruct
    wo: jax.ShapeDtypeStruct


class MLP(eqx.Module):
    gate: jax.ShapeDtypeStruct
    up: jax.ShapeDtypeStruct
    down: jax.ShapeDtypeStruct


class Layer(eqx.Module):
    attention: Attention
    mlp: MLP
    norm1: jax.ShapeDtypeStruct
    norm2: jax.ShapeDtypeStruct


class Llama(eqx.Module):
    embed: jax.ShapeDtypeStruct
    layers: list[Layer]
    norm: jax.ShapeDtypeStruct
    head: jax.ShapeDtypeStruct


def llama(layers: int = 80, width: int = 8192, hidden: int = 28672, kv: int = 1024, vocab: int = 128256) -> Llama:
    """The shapes of a model of 70 billion parameters; nothing is allocated."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    def layer() -> Layer:
        attention = Attention(leaf(width, width), leaf(width, kv), leaf(width, kv), leaf(width, width))
        mlp = MLP(leaf(width, hidden), leaf(width, hidden), leaf(hidden, width))
        return Layer(attention, mlp, leaf(width), leaf(width))

    return Llama(leaf(vocab, width), [layer() for _ in range(layers)], leaf(width), leaf(width, vocab))


def plan() -> eqshard.ShardingPlan:
    """Tensor parallel in use, FSDP at rest; the head was forgotten, for the report to say so."""
    found = eqshard.replicated_plan(llama(), eqshard.MeshSpec(data=2, fsdp=8, tp=4, chip="v5p"))
    rules = {"w[qkv]|gate|up": P("fsdp", "tp"), "wo|down|embed": P("tp", "fsdp")}
    for pattern, spec in rules.items():
        use = P(*(None if entry == "fsdp" else entry for entry in spec))
        found = found.at(pattern).set(spec, use=use, why=f"the rule '{pattern}'")
    return found


def shoot(page: pathlib.Path, anchor: str, image: pathlib.Path, *, dark: bool, width: int = WIDTH) -> None:
    """A picture of a page, cut below the last thing that is on it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("needs Chromium: install the package chromium.")
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        size = f"--window-size={width},{ROOM}"
        where = [f"--user-data-dir={profile}", f"--screenshot={image}", f"{page.as_uri()}#{anchor}"]
        subprocess.run([chromium, *FLAGS, scheme, size, *where], check=True, capture_output=True, timeout=120)
    picture = Image.open(image).convert("RGB")
    ground = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, ground).getbbox()
    bottom = picture.height if box is None else min(box[3] + 24, picture.height)
    picture.crop((0, 0, width, bottom)).quantize(256).save(image, optimize=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=pathlib.Path, help="also write the page here")
    keep = arguments.parse_args().keep
    IMAGES.mkdir(exist_ok=True)
    made = plan()
    text = eqshard.report(made, format="html")
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder) / "plan.html"
        page.write_text(text)
        for dark in (False, True):
            shoot(page, LEAF, IMAGES / f"plan_{'dark' if dark else 'light'}.png", dark=dark)
    (IMAGES / "leaf.svg").write_text(eqshard.visualize_leaf(made, ".layers[0].mlp.gate", format="svg"))
    if keep is not None:
        keep.write_text(text)


if __name__ == "__main__":
    main()
