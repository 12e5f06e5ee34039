"""What a plan costs in seconds and bytes, predicted from measured profiles. No torch.

``cost_model`` prices layers and stages, ``memory`` devices at their peak, ``network`` transfers and collectives;
``simulation`` replays a whole step with these prices, and ``capacity`` says whether a plan fits its devices. What one
layer costs is in ``layers``, what somebody else's runtime does differently in ``other_runtimes``.
"""
