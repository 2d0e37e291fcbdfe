"""PyG models on blocks, with the outputs that plain PyG has on the whole graph.

Read `gnn` first: a model is encode, layers and decode. The folder may import `tables` and what `tables` may
import. The other files:

    conv_adapter                runs any PyG conv on a block, or between two tables of rows, in a way that a trial
                                has shown to be right
    conv_facts                  what is found out about a conv once, and again only when the conv has changed
    probe                       the tiny graph of these trials, and the store of their findings
    fused, attention            the fast ways for common convs, without a row per edge
    tree_layers                 the fast ways in the tree layout on a GPU
    gcn_norm                    GCN's degree norm, unbiased on sampled edges
    norms, row_wise             modules between convs: statistics of batch norms, and the check that rows do not mix
    layered                     the interface of models made of layers
    traced                      layers found in a `forward` of the user's own
    traced_program              takes such a `forward` apart
    traced_model                runs it layer by layer
    traced_probe                shows that this is equal to `forward`
    whole_module                models that are not made of layers, run as a whole
    whole_module_probe          finds out how many hops such a model reads
    push_and_pull               historical embeddings in a `forward` of the user's own
    push_and_pull_probe         finds out whether such a `forward` is right on batches
    smoothness                  a penalty on layers that noise moves far, for historical training
    structure                   a fingerprint of what a model computes

A conv that would differ from plain PyG is refused by name: keep that.

State of the process: `probe.findings` owns the findings about each module, and drops them with the module.
"""

from hopline.nn.conv_adapter import convolve
from hopline.nn.gnn import GNN
from hopline.nn.layered import State
from hopline.nn.push_and_pull import push_and_pull
from hopline.nn.traced import Traced
from hopline.nn.whole_module import Whole, as_batch_model

__all__ = ["GNN", "State", "Traced", "Whole", "as_batch_model", "convolve", "push_and_pull"]
