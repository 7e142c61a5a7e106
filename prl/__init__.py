"""prl: asynchronous reinforcement learning of Mixture-of-Experts language models, natively on Slurm."""
