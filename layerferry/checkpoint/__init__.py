"""Checkpoints: the whole state of a run in ``checkpoint-N``, written in the background, resumed exactly under any plan.

A folder holds the model as plain transformers loads it (one shard a unit) and beside each shard a ``state-*.safetensors`` with
what the shard cannot hold: the low halves of the fp32 masters and the optimizer's planes, by parameter name. ``manifest.json``
lists every file with its size and checksums, and stands in the folder only when all of them do.

``contents`` what is in a checkpoint of an engine · ``save`` writing it while training goes on · ``restore`` reading it back ·
``manifest`` the list, ``checksum`` its numbers · ``folders`` which checkpoints there are, which is resumed, which may go ·
``files`` the only door to the disk, so that tests can break it anywhere · ``lock`` one run a folder.
The promises, and the tests that hold them: ``docs/reliability.md``.
"""
