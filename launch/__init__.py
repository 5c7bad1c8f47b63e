"""Programs: `python -m launch.<name>` here, `finetune.launch.<name>` once installed."""
