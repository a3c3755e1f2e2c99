"""The tensors of training, on one process or several ranks: `trained_model` has the parts that all
training shares, `learner` adds reinforcement learning, `sft_learner` supervised fine-tuning.
"""
