"""What is learnt: the form of the labels, the loss of a batch, the metric, and what predictions look like.

    labels           the kinds of labels that a dataset may have, and what each must satisfy
    task             `Task`, the contract: what the trainer, the methods and inference ask
    settings         `Classification` and `Regression`, as users type them; `bind` makes the `Task` of a dataset
    classification   one class per node, a yes or no, or several labels
    regression       numbers

    Dataset.task (kind of labels)  ->  settings  --bind(labels of the training nodes)-->  Task

A new task is a file here: a subclass of `Task`, and settings if users choose any. A new kind of labels is a
class in `labels`. Nothing above this folder asks which task it is.

The folder stands on `core` and `metrics`. Datasets stand on it.
"""
