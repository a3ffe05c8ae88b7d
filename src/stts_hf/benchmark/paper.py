"""The paper's two throughput tables (supplement, "Detailed Throughput Tables"), 8 H100, Molmo2-4B."""

# (mode, frames in a batch, pruning ratio): speed-up over the same system without pruning
SPEED_UPS = {
    ("training", 128, 0.3): 1.28,
    ("training", 128, 0.4): 1.44,
    ("training", 128, 0.5): 1.62,
    ("training", 256, 0.3): 1.48,
    ("training", 256, 0.4): 1.88,  # THROUGHPUT makes it 1.78
    ("training", 256, 0.5): 2.25,
    ("inference", 128, 0.3): 1.14,
    ("inference", 128, 0.4): 1.30,
    ("inference", 128, 0.5): 1.61,
    ("inference", 256, 0.3): 1.45,
    ("inference", 256, 0.4): 1.71,
    ("inference", 256, 0.5): 2.22,
}
# (frames in a batch, pruning ratio): "Toks/Inst."
TOKENS_PER_INSTANCE = {
    (128, 0.0): 15670,
    (128, 0.3): 12560,
    (128, 0.4): 11524,
    (128, 0.5): 10486,
    (256, 0.0): 25307,
    (256, 0.3): 19087,
    (256, 0.4): 17013,
    (256, 0.5): 14939,
}
# (mode, frames in a batch, pruning ratio): batches per second
THROUGHPUT = {
    ("training", 128, 0.0): 0.1932,
    ("training", 128, 0.3): 0.2478,
    ("training", 128, 0.4): 0.2786,
    ("training", 128, 0.5): 0.3130,
    ("training", 256, 0.0): 0.0549,
    ("training", 256, 0.3): 0.0811,
    ("training", 256, 0.4): 0.0977,
    ("training", 256, 0.5): 0.1233,
    ("inference", 128, 0.0): 1.0186,
    ("inference", 128, 0.3): 1.1651,
    ("inference", 128, 0.4): 1.3270,
    ("inference", 128, 0.5): 1.6439,
    ("inference", 256, 0.0): 0.2641,
    ("inference", 256, 0.3): 0.3836,
    ("inference", 256, 0.4): 0.4516,
    ("inference", 256, 0.5): 0.5870,
}
