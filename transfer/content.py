"""Does a good result account for everything that was granted?"""

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.attempts import Source
from kvferry.transfer.types import Grant, TransferResult


def check_content(source: Source, grant: Grant, result: TransferResult) -> None:
    """Raise RemoteProtocolError unless a good result accounts for every granted page and for the first token."""
    wire, aux = result.wire, result.aux
    if wire.num_pages != grant.pages.num_pages or (wire.num_slices == 0) != (wire.num_pages == 0):
        raise RemoteProtocolError(
            f"result accounts for {wire.num_pages} pages in {wire.num_slices} slices, {grant.pages.num_pages} pages "
            "were granted"
        )
    if source.session.drives and (source.job is None or source.job.num_slices != wire.num_slices):
        raise RemoteProtocolError(f"result is ok after {wire.num_slices} slices, but they were not read here")
    if aux is None or len(aux.first_tokens) != 1 or len(aux.first_logprobs) != 1 or aux.draft_tokens:
        raise RemoteProtocolError(f"result is ok but does not carry exactly one first token: {aux}")
    if aux.usage.prompt_tokens != grant.prompt.num_tokens:
        raise RemoteProtocolError(f"result is for {aux.usage.prompt_tokens} prompt tokens, granted was {grant.prompt}")
