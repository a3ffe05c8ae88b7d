"""Does it work: synthetic questions about clips, baselines, the study, and the scoring of answers."""
