"""From rows of a data set to the batches a model trains on."""
