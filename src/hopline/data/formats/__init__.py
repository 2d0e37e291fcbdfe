"""One file per format that is read: CSV and Parquet, npz, OGB, PyG, DGL.

A new format is a function that returns a `Dataset`, a name in `data/registry`, and ugly inputs in
`tests/data/ugly_inputs.py`. Nothing is unpickled, and what cannot be read is refused with the file and the row.
"""
