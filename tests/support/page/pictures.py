"""Pictures with a palette, which are a third as large as those that a browser takes."""

import base64
import struct
import zlib

import numpy as np
from selenium import webdriver

_COLOURS = 256
_PIXELS = """
const [url, done] = arguments;
const image = new Image();
image.onload = () => {
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  let text = "";
  for (let at = 0; at < data.length; at += 30000)
    text += String.fromCharCode(...data.subarray(at, at + 30000));
  done([image.width, image.height, btoa(text)]);
};
image.src = `data:image/png;base64,${url}`;
"""


def with_palette(driver: webdriver.Chrome, picture: str) -> bytes:
    """Return a PNG of at most 256 colours.  picture: a PNG in base64, which the browser decodes."""
    width, height, pixels = driver.execute_async_script(_PIXELS, picture)
    colours = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(-1, 4)[:, :3]
    # Alike colours of smooth edges become one.
    coarse = (colours >> 3).astype(np.uint32) @ np.array([1 << 10, 1 << 5, 1], np.uint32)
    _, index, counts = np.unique(coarse, return_inverse=True, return_counts=True)
    kept = np.argsort(-counts)[:_COLOURS]
    values = np.stack([np.bincount(index, colours[:, part]) / counts for part in range(3)], axis=1)
    distances = ((values[:, None] - values[kept][None]) ** 2).sum(axis=2)
    rows = distances.argmin(axis=1).astype(np.uint8)[index].reshape(height, width)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = values[kept].round().astype(np.uint8).tobytes()
    parts = [
        (b"IHDR", head),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
