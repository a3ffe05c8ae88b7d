"""Running a model over many videos."""
