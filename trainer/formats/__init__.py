"""Foreign formats that the trainer reads and writes: zxell, Zrodlo, Transformers directories. See docs/formats.md."""
