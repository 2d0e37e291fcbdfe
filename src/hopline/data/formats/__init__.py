"""One file per format that is read: CSV and Parquet, npz, OGB, PyG, DGL.

A new format is a function that returns a `Dataset`, a name in `data/registry`, and ugly inputs in
`tests/data/ugly_inputs.py`. No file is unpickled. A value that cannot be read is refused with its file and
row.
"""
