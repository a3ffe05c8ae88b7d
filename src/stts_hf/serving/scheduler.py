"""vLLM's scheduler, which may compute a prompt in several steps, but never its vision tokens in two."""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class WholeVisionScheduler(Scheduler):
    """
    The vision tokens of a prompt see each other in both directions, across images and videos: one step computes them
    all. vLLM's `disable_chunked_mm_input` holds single items together, and not where a step begins with one.
    """

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        """As in vLLM; a step that would end between vision tokens ends before the first, or is left out."""
        scheduled = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
        )
        if not request.mm_features:
            return scheduled
        spans = [feature.mm_position for feature in request.mm_features]
        first, end = min(span.offset for span in spans), max(span.offset + span.length for span in spans)
        if first < num_computed_tokens + scheduled[1] < end:
            return [], max(0, first - num_computed_tokens), encoder_compute_budget, [], []
        return scheduled
