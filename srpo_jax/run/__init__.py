"""What a run consists of besides its loop: parts, folder, logs, checkpoints, evaluation."""
