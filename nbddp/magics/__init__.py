"""``%ddp``, ``%%ddp`` and ``%%local``: parse, delegate, show."""
