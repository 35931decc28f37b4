"""The shortest recipe."""

MINIMAL = """
name: tiny
model: some/model
workflow: math
tasks: {train: {name: arithmetic, size: 8}}
rollout: {tasks_per_step: 2, group_size: 2, prompt_tokens: 64, response_tokens: 16, slots: 4}
optimizer: {lr: 1e-6}
learner: {micro_batch_rows: 4}
trainer: {steps: 3}
"""
